// SPDX-License-Identifier: Apache-2.0
//! Rounds, bounded staleness, deadlines and aborts.

use std::time::Duration;

use edl_core::id::BatchId;
use edl_core::spec::Mode;
use edl_net::data::{Error, Limits, PsClient, Versions};
use edl_net::handshake::Encryption;

use crate::harness::{
    By, Client, DEADLINE, N_BATCHES, N_PARTITIONS, RUN, ServerPair, batch, key, layout, load_spec,
    model,
};

const PAIRS: Mode = Mode::Sync { grads_to_wait: 2 };

#[test]
fn one_client_supplies_both_gradients_of_a_round() {
    let job = ServerPair::start(PAIRS);
    let mut client = job.client(1, By::Unix);
    client.push(batch(0), 1.0).unwrap();
    client.push(batch(1), 3.0).unwrap();
    let mut acked = [client.ack().unwrap().0, client.ack().unwrap().0];
    acked.sort();
    assert_eq!(acked, [batch(0), batch(1)]);
    // The mean of both, in one step.
    client.expect(2.0);
    assert_eq!(client.pull(Some(1)).unwrap(), [1, 1]);
}

#[test]
fn the_last_round_of_an_epoch_is_smaller() {
    let job = ServerPair::start(PAIRS);
    let mut client = job.client(1, By::Unix);
    for index in 0..N_BATCHES {
        client.push(batch(index), 1.0).unwrap();
    }
    for _ in 0..N_BATCHES {
        client.ack().unwrap();
    }
    client.push(BatchId { epoch: 1, index: 0 }, 1.0).unwrap();
    assert_eq!(client.pull(Some(3)).unwrap(), [3, 3]);
    client.expect(3.0);
}

#[test]
fn a_pull_waits_for_its_round() {
    let job = ServerPair::start(PAIRS);
    let (mut ann, mut bob) = (job.client(1, By::Unix), job.client(1, By::Tcp));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| bob.pull(Some(1)).unwrap());
        ann.push(batch(0), 1.0).unwrap();
        ann.push(batch(1), 1.0).unwrap();
        assert_eq!(waiting.join().unwrap(), [1, 1]);
    });
    assert_eq!(bob.dense, [1.0; 20]);
}

#[test]
fn a_batch_staged_by_a_lost_client_and_pushed_again_counts_once() {
    let job = ServerPair::start(PAIRS);
    let mut lost = job.client(1, By::Unix);
    lost.push(batch(0), 1.0).unwrap();
    // It makes no difference to the round whether the push arrived or was lost with its client.
    drop(lost);
    let mut client = job.client(1, By::Unix);
    client.push(batch(0), 1.0).unwrap();
    client.push(batch(1), 1.0).unwrap();
    client.ack().unwrap();
    client.ack().unwrap();
    client.expect(1.0);
    assert_eq!(job.updates(), [2; N_PARTITIONS as usize]);
}

#[test]
fn a_wait_times_out_with_its_reason_and_the_client_continues() {
    let job = ServerPair::start(PAIRS);
    let limits = Limits { pull: Duration::from_millis(10), ..Limits::all(DEADLINE) };
    let route = job.route(1, By::Unix);
    let net =
        PsClient::connect(&route, (&key(), RUN, Encryption::default()), layout(), &model(), limits)
            .unwrap();
    let mut client = Client { net, ..job.client(1, By::Unix) };
    let waited = client.pull(Some(2)).unwrap_err().to_string();
    assert_eq!(waited, "gave up waiting for 2 rounds: partition 0 has applied 0");
    client.expect(0.0);
}

#[test]
fn a_missing_acknowledgement_is_named() {
    let job = ServerPair::start(PAIRS);
    let limits = Limits { ack: Duration::from_millis(10), ..Limits::all(DEADLINE) };
    let route = job.route(1, By::Unix);
    let net =
        PsClient::connect(&route, (&key(), RUN, Encryption::default()), layout(), &model(), limits)
            .unwrap();
    let mut client = Client { net, ..job.client(1, By::Unix) };
    client.push(batch(0), 1.0).unwrap();
    let waited = client.ack().unwrap_err().to_string();
    assert!(waited.ends_with("to acknowledge batch 0/0"), "{waited}");
}

#[test]
fn an_abort_ends_every_wait_at_once() {
    let job = ServerPair::start(PAIRS);
    let mut client = job.client(1, By::Unix);
    let abort = client.net.abort_handle();
    client.push(batch(0), 1.0).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let pulled = client.pull(Some(99)).unwrap_err();
            let acked = client.ack().unwrap_err();
            (pulled, acked)
        });
        abort.abort();
        let (pulled, acked) = waiting.join().unwrap();
        assert!(matches!(pulled, Error::Closed), "{pulled}");
        assert!(matches!(acked, Error::Closed), "{acked}");
    });
}

#[test]
fn a_new_generation_ends_the_waits_of_the_old_one() {
    let job = ServerPair::start(PAIRS);
    let mut client = job.client(1, By::Unix);
    client.push(batch(0), 1.0).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| (client.pull(Some(1)), client.ack()));
        job.load(2, PAIRS);
        let (pulled, acked) = waiting.join().unwrap();
        let is_over = |error| matches!(error, Error::NotServing | Error::Generation { .. });
        assert!(is_over(pulled.unwrap_err()) && is_over(acked.unwrap_err()));
    });
    job.client(2, By::Unix).expect(0.0);
}

#[test]
fn a_client_that_connects_before_the_load_is_served_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let servers = [0, 1].map(|ps| crate::harness::Server::start(folder.path(), ps));
    let job = ServerPair { servers, folder };
    let mut client = job.client(1, By::Unix);
    std::thread::scope(|scope| {
        let early = scope.spawn(|| client.pull(None).unwrap());
        job.load(1, Mode::Async);
        assert_eq!(early.join().unwrap(), [0, 0]);
    });
}

#[test]
fn no_client_is_answered_before_the_order_to_serve() {
    let job = ServerPair::start(Mode::Async);
    for (server, partitions) in job.servers.iter().zip(crate::harness::shares()) {
        server.load(load_spec(2, partitions, Mode::Async)).unwrap();
    }
    let limits = Limits { pull: Duration::from_millis(10), ..Limits::all(DEADLINE) };
    let route = job.route(2, By::Unix);
    let net =
        PsClient::connect(&route, (&key(), RUN, Encryption::default()), layout(), &model(), limits)
            .unwrap();
    let mut client = Client { net, ..job.client(2, By::Unix) };
    assert!(matches!(client.pull(None), Err(Error::NotServing)));
}

#[test]
fn with_bounded_staleness_fast_clients_wait_for_slow_ones_at_pull() {
    let job = ServerPair::start(Mode::Bounded { versions: 2 });
    let (mut slow, mut fast) = (job.client(1, By::Unix), job.client(1, By::Unix));
    slow.pull(None).unwrap();
    for index in 0..2 {
        let base = Versions(fast.pull(None).unwrap());
        fast.push_from(batch(index), 1.0, &base).unwrap();
        fast.ack().unwrap();
    }
    std::thread::scope(|scope| {
        // It is two versions ahead of the slow client, so its pull waits for the slow one's push.
        let waiting = scope.spawn(|| fast.pull(None).unwrap());
        slow.push(batch(2), 1.0).unwrap();
        slow.ack().unwrap();
        assert_eq!(waiting.join().unwrap(), [3, 3]);
    });
}

#[test]
fn with_bounded_staleness_no_client_waits_for_a_disconnected_one() {
    let job = ServerPair::start(Mode::Bounded { versions: 1 });
    let (mut gone, mut client) = (job.client(1, By::Unix), job.client(1, By::Unix));
    gone.pull(None).unwrap();
    client.push(batch(0), 1.0).unwrap();
    client.ack().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.pull(None).unwrap());
        drop(gone);
        assert_eq!(waiting.join().unwrap(), [1, 1]);
    });
}
