// SPDX-License-Identifier: Apache-2.0
//! Messages of the control plane, in both directions, and the sets of applied batches in them.

use edl_core::applied::AppliedSet;
use edl_core::spec::JobSpec;
use edl_net::convert::worlds::ReceivedWorlds;
use edl_net::convert::{master, member, server, worker};
use edl_net::proto;
use prost::Message;

/// Reads a message, unless it is malformed. What was read can be written and read again.
fn read<M: Message + Default>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    let written = message.encode_to_vec();
    let again = M::decode(&*written).expect("what was written can be read");
    // Bytes are compared, not values: a NaN is not equal to itself.
    assert!(again.encode_to_vec() == written, "a message has changed");
    Some(message)
}

/// What a worker or a user sends to a master.
pub(crate) fn worker_message(bytes: &[u8]) {
    if let Some(message) = read::<proto::WorkerMessage>(bytes) {
        drop(master::worker_report(message));
    }
    if let Some(request) = read::<proto::ChaosRequest>(bytes) {
        drop(master::chaos(&request));
    }
}

/// What a server sends to its master.
pub(crate) fn ps_message(bytes: &[u8]) {
    use proto::ps_message::Kind;
    match read::<proto::PsMessage>(bytes) {
        Some(proto::PsMessage { kind: Some(Kind::Hello(hello)) }) => drop(master::ps_hello(hello)),
        Some(message) => drop(master::ps_report(message)),
        None => {}
    }
}

/// What a master sends to workers and servers, and to the command line.
pub(crate) fn command(bytes: &[u8]) {
    if let Some(kind) = read::<proto::WorkerCommand>(bytes).and_then(|command| command.kind) {
        if let proto::worker_command::Kind::World(world) = &kind {
            drop(member::peers(world));
            let mut received = ReceivedWorlds::default();
            // Most worlds are differences from no world, so they are tried after themselves, too.
            for changes in [None, world.changes.clone()] {
                drop(received.receive(proto::World { changes, ..world.clone() }));
            }
        }
        drop(worker::command(kind));
    }
    if let Some(kind) = read::<proto::PsCommand>(bytes).and_then(|command| command.kind) {
        drop(server::event(kind, &JobSpec::default()));
    }
    drop(read::<proto::JobStatus>(bytes));
    drop(read::<proto::AuditReport>(bytes));
}

/// A set of applied batches, alone and after another one.
pub(crate) fn applied(bytes: &[u8]) {
    let Some(set) = AppliedSet::from_bytes(bytes, None) else { return };
    let again = AppliedSet::from_bytes(&set.to_bytes(None), None);
    assert_eq!(again.as_ref(), Some(&set), "a set has changed");
    let base = AppliedSet::of_first(3, set.n_batches());
    let again = AppliedSet::from_bytes(&set.to_bytes(Some(&base)), Some(&base));
    assert_eq!(again.as_ref(), Some(&set), "a set has changed on the way");
    drop(AppliedSet::from_bytes(bytes, Some(&base)));
}
