"""What people and programs are told of it all: statistics, gauges, and why something is as it is.

Law: asking changes nothing, not even how fast the next question is answered; all numbers of an answer are of the same
instant. It may read every room, and none may use it but the machine.
"""
