"""Robot commands of the command line: each module has ``SUMMARY``, ``add_arguments(parser)`` and ``run(arguments)``.

Parsers are built at start-up, so nothing heavy is imported outside ``run``.
"""
