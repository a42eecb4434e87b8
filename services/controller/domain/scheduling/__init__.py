"""Which job runs where and when: the queue, gang placement, preemption, elastic jobs."""
