"""Which requests run, where, and what each step computes.

Law: nobody waits for ever: requests start in the order of the queue, the oldest of a pool is never preempted, and
whoever is blocked has written down what it waits for. A step is planned from what is known, without waiting for the
step before. It knows requests and the cache, and nothing of who asked.

From outside: `Admission` takes requests in and lets them go, `Scheduler.plan` gives a group its next step, and the
queue and the rows may be read.
"""
