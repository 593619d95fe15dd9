"""``python -m k3port`` is the command ``k3port``."""

from k3port.cli.main import main

raise SystemExit(main())
