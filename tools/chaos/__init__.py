"""Real processes killed, stopped and restarted at random, with both sides' books compared afterwards."""
