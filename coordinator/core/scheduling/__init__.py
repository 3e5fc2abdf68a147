"""The scheduler: which requests run, where, and what each step computes.

No request waits forever: requests start in queue order, the oldest request of a pool is never preempted, and a
blocked request records the events that can unblock it. A step is planned without waiting for the result of the step
before. The package knows requests and the cache, not clients.

`Admission` admits and releases requests; `Scheduler.plan` builds a group's next step. Other packages may read the
queue and the rows.
"""
