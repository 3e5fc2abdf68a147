"""What a gateway is told when it starts."""
