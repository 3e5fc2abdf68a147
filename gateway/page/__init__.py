"""The live page at /: plain files without a build step, kept up to date by server-sent events."""
