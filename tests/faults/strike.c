// Strikes one operation on files below a folder: preloaded into a process, which then calls `strike`.
// Operations are counted over all threads. At the n-th, it fails, is cut short, or the process is killed
// before or after it, or a folder is moved away before it, or another process is killed.
// Writes and syncs of files are listed in the log, with the file's size before: what a power cut would take.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, FSYNC = 4, RENAME = 8, UNLINK = 16, MKDIR = 32, READ = 64, TRUNCATE = 128 };
static char root[PATH_MAX], moved[PATH_MAX], other[PATH_MAX];
static size_t length;
static int armed, mask, number, nth, times, logged = -1;
static char mode;
static atomic_int count;

static void note(const char *text, size_t size) { if (logged >= 0) syscall(SYS_write, logged, text, size); }

// `how`: c counts, f fails, s is cut short, b and a kill before and after, m moves, k kills the process `error`.
void strike(const char *folder, int operations, int n, char how, int error, int many, const char *log,
            const char *from, const char *to) {
  length = snprintf(root, sizeof root, "%s", folder);
  snprintf(moved, sizeof moved, "%s", from);
  snprintf(other, sizeof other, "%s", to);
  mask = operations; nth = n; mode = how; number = error; times = many;
  logged = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  atomic_store(&count, 0);
  armed = 1;
}

int struck(void) { return atomic_load(&count); }

static int under(const char *path) {
  return armed && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int path_of(int handle, char *out) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
  ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
  out[n < 0 ? 0 : n] = 0;
  return n >= 0;
}

static void full(int folder, const char *path, char *out) {
  char place[PATH_MAX];
  int handle, used = 0;
  out[0] = 0;
  if (!armed || !path) return;
  if (sscanf(path, "/proc/self/fd/%d%n", &handle, &used) == 1 && used) {
    path_of(handle, place);
    snprintf(out, PATH_MAX, "%s%s", place, path + used);
  } else if (path[0] == '/') snprintf(out, PATH_MAX, "%s", path);
  else {
    if (folder != AT_FDCWD) path_of(folder, place);
    else if (syscall(SYS_getcwd, place, sizeof place) < 0) place[0] = 0;
    snprintf(out, PATH_MAX, "%s/%s", place, path);
  }
}

static void die(void) { syscall(SYS_kill, getpid(), SIGKILL); for (;;) pause(); }

// 0: goes on; 1: fails, errno is set; 2: cut short; 3: killed after it
static int hit(int kind, const char *what, const char *path) {
  if (!armed || !(kind & mask) || !under(path)) return 0;
  int i = atomic_fetch_add(&count, 1) + 1;
  if (mode == 'c') {
    char told[PATH_MAX + 16];
    note(told, snprintf(told, sizeof told, "= %s %s\n", what, path));
  }
  if (nth <= 0 || i < nth || i >= nth + times) return 0;
  char line[PATH_MAX + 64];
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  note(line, snprintf(line, sizeof line, "! %ld.%03ld %s %s\n", now.tv_sec, now.tv_nsec / 1000000, what, path));
  switch (mode) {
    case 'f': errno = number; return 1;
    case 's': return 2;
    case 'b': die();
    case 'a': return 3;
    case 'k': syscall(SYS_kill, number, SIGKILL); return 0;
    case 'm':
      syscall(SYS_renameat2, AT_FDCWD, root, AT_FDCWD, moved, 0);
      if (other[0]) syscall(SYS_renameat2, AT_FDCWD, other, AT_FDCWD, root, 0);
  }
  return 0;
}

static void written(int handle, const char *path, char sign) {
  struct stat about;
  char line[64];
  if (under(path) && !fstat(handle, &about) && S_ISREG(about.st_mode))
    note(line, snprintf(line, sizeof line, "%c %lu %ld\n", sign, about.st_ino, (long)about.st_size));
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name);
#define OPENED(folder, call) \
  mode_t m = 0; \
  if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); m = va_arg(more, mode_t); va_end(more); } \
  char p[PATH_MAX]; full(folder, path, p); \
  int h = hit(flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) ? OPEN : READ, "open", p); \
  if (h == 1) return -1; \
  int r = call; if (h == 3) die(); return r;
int open(const char *path, int flags, ...) { REAL(int, open, const char *, int, ...) OPENED(AT_FDCWD, real(path, flags, m)) }
int open64(const char *path, int flags, ...) { REAL(int, open64, const char *, int, ...) OPENED(AT_FDCWD, real(path, flags, m)) }
int openat(int f, const char *path, int flags, ...) { REAL(int, openat, int, const char *, int, ...) OPENED(f, real(f, path, flags, m)) }
int openat64(int f, const char *path, int flags, ...) { REAL(int, openat64, int, const char *, int, ...) OPENED(f, real(f, path, flags, m)) }

#define HANDLED(kind, what, shorter, call) \
  char p[PATH_MAX]; int h = 0, known = armed && handle > 2 && path_of(handle, p); \
  if (known) h = hit(kind, what, p); \
  if (h == 1) return -1; \
  if (h == 2) { shorter } \
  if (known && kind == WRITE) written(handle, p, '+'); \
  ssize_t r = call; \
  if (known && kind == FSYNC && r >= 0) written(handle, p, '-'); \
  if (h == 3) die(); \
  return r;
#define HALF if (size > 1) size /= 2;
ssize_t write(int handle, const void *data, size_t size) { REAL(ssize_t, write, int, const void *, size_t) HANDLED(WRITE, "write", HALF, real(handle, data, size)) }
ssize_t pwrite(int handle, const void *data, size_t size, off_t at) { REAL(ssize_t, pwrite, int, const void *, size_t, off_t) HANDLED(WRITE, "write", HALF, real(handle, data, size, at)) }
ssize_t pwrite64(int handle, const void *data, size_t size, off64_t at) { REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t) HANDLED(WRITE, "write", HALF, real(handle, data, size, at)) }
ssize_t writev(int handle, const struct iovec *parts, int size) { REAL(ssize_t, writev, int, const struct iovec *, int) HANDLED(WRITE, "write", if (size > 1) size = 1;, real(handle, parts, size)) }
ssize_t read(int handle, void *data, size_t size) { REAL(ssize_t, read, int, void *, size_t) HANDLED(READ, "read", HALF, real(handle, data, size)) }
ssize_t pread(int handle, void *data, size_t size, off_t at) { REAL(ssize_t, pread, int, void *, size_t, off_t) HANDLED(READ, "read", HALF, real(handle, data, size, at)) }
ssize_t pread64(int handle, void *data, size_t size, off64_t at) { REAL(ssize_t, pread64, int, void *, size_t, off64_t) HANDLED(READ, "read", HALF, real(handle, data, size, at)) }
int fsync(int handle) { REAL(int, fsync, int) HANDLED(FSYNC, "fsync", , real(handle)) }
int fdatasync(int handle) { REAL(int, fdatasync, int) HANDLED(FSYNC, "fsync", , real(handle)) }
int ftruncate(int handle, off_t size) { REAL(int, ftruncate, int, off_t) HANDLED(TRUNCATE, "truncate", , real(handle, size)) }
int ftruncate64(int handle, off64_t size) { REAL(int, ftruncate64, int, off64_t) HANDLED(TRUNCATE, "truncate", , real(handle, size)) }

#define NAMED(kind, what, folder, path, call) \
  char p[PATH_MAX]; full(folder, path, p); \
  int h = hit(kind, what, p); \
  if (h == 1) return -1; \
  int r = call; if (h == 3) die(); return r;
int rename(const char *a, const char *b) { REAL(int, rename, const char *, const char *) NAMED(RENAME, "rename", AT_FDCWD, a, real(a, b)) }
int renameat(int f, const char *a, int g, const char *b) { REAL(int, renameat, int, const char *, int, const char *) NAMED(RENAME, "rename", f, a, real(f, a, g, b)) }
int renameat2(int f, const char *a, int g, const char *b, unsigned how) { REAL(int, renameat2, int, const char *, int, const char *, unsigned) NAMED(RENAME, "rename", f, a, real(f, a, g, b, how)) }
int unlink(const char *a) { REAL(int, unlink, const char *) NAMED(UNLINK, "unlink", AT_FDCWD, a, real(a)) }
int unlinkat(int f, const char *a, int how) { REAL(int, unlinkat, int, const char *, int) NAMED(UNLINK, "unlink", f, a, real(f, a, how)) }
int rmdir(const char *a) { REAL(int, rmdir, const char *) NAMED(UNLINK, "rmdir", AT_FDCWD, a, real(a)) }
int mkdir(const char *a, mode_t m) { REAL(int, mkdir, const char *, mode_t) NAMED(MKDIR, "mkdir", AT_FDCWD, a, real(a, m)) }
int mkdirat(int f, const char *a, mode_t m) { REAL(int, mkdirat, int, const char *, mode_t) NAMED(MKDIR, "mkdir", f, a, real(f, a, m)) }
