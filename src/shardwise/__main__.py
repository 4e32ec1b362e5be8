"""``python -m shardwise``: the same as the `shardwise` command."""

from shardwise.cli import main

raise SystemExit(main())
