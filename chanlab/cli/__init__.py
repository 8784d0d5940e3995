"""The `chanlab` command: thin, and quick to answer, since each subcommand imports what it needs when it runs."""
