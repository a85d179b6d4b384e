"""Every sentence that chipwise prints: facts (a code and its numbers) made into text, in this one place."""
