"""The one exception that stands for a user's mistake: tools print its single line and exit 2, without a traceback."""


class UserError(Exception):
    """Something the user gave (configuration, data, checkpoint) cannot be used; the message names it and its value."""
