"""The subcommands of `kvforge`, one module each: `add(subparsers)` declares it, `run(options)` carries it out."""
