"""A coordinator restarted without its state gives no client another client's request."""

from __future__ import annotations

import pytest

from kvforge.protocol import codec
from kvforge.protocol.errors import CoordinatorUnavailable, RequestNotFound, SequenceNotFound
from kvforge.protocol.messages import Hello, Refused
from tools.cluster.cluster import Cluster

from .test_cluster import RawPeer


def test_after_a_restart_nobody_reads_anothers_request_and_who_names_the_lost_boot_is_told() -> None:
    with Cluster(coordinator='durability = "none"\n') as cluster:
        ours = cluster.start()
        request = ours.submit([1, 2, 3], detached=True, tenant="a")
        sequence = ours.create_sequence([1, 2, 3], idle_ttl_s=600)
        boot = ours.stats().boot
        cluster.kill("coordinator")
        cluster.start_coordinator()
        others = cluster.client()
        theirs = others.submit([7, 8, 9], tenant="b", detached=True)
        other_sequence = others.create_sequence([7, 8, 9])
        assert theirs.id > request.id and other_sequence.id > sequence.id
        with pytest.raises(CoordinatorUnavailable):
            next(iter(request))
        with pytest.raises(RequestNotFound, match="before the coordinator was started"):
            ours.attach(request.id)
        with pytest.raises(SequenceNotFound, match="before the coordinator was started"):
            ours.info(sequence)
        assert others.status(theirs.id).tenant == "b"
        with RawPeer(cluster.endpoint) as peer:
            answer = peer.ask(codec.encode(Hello(rid=1, boot=boot)))
            assert isinstance(answer, Refused)
            assert (answer.error.code, answer.error.fields["boot"]) == ("state_lost", others.stats().boot)
