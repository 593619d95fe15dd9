"""A group of commands that helps with misspelled names."""

from __future__ import annotations

import difflib
import re

import click

from k3port.errors import UsageError


class Commands(click.Group):
    """A group that names the nearest command when it has none of that name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            names = self.list_commands(ctx)
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {ctx.command_path} {near[0]}?" if near else f"commands: {', '.join(names)}"
            if "run" in names and not near:
                hint += '; a prompt comes after run: k3port run "…"'
            # A prompt without its command would be quoted here, and prompts stay out of messages.
            what = f"unknown command {name}" if re.fullmatch(r"[\w-]{1,24}", name) else "unknown command"
            raise UsageError(what, hint=hint)
        return super().resolve_command(ctx, args)
