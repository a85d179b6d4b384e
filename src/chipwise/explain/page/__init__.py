"""Pages of one look: each a single HTML file that needs no network and no other file."""
