// SPDX-License-Identifier: Apache-2.0
//! Entry points for fuzzers: foreign bytes must be refused, never believed and never a panic.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use edl_core::id::{BatchId, Generation, RunId};
use edl_tensor::push::Body;

use crate::data::server::{self, PullRequest, PushRequest};
use crate::data::session::{Connection, Party};
use crate::frame::{
    FrameKind, HEADER_LEN, Header, PieceHead, PullHead, PushHead, decode_refusal, encode_refusal,
};
use crate::handshake::{Challenge, ClientId, Encryption, Hello, Join, Role};
use crate::key::JobKey;
use crate::wire::Stream;

const RUN: RunId = RunId([7; 16]);
const GENERATION: Generation = Generation(2);
/// What the client of [`relay`] sends after the handshake: one partition, no tables, two numbers.
const PUSHED: [f32; 2] = [0.5, -2.0];
/// The most that a stranger sends.
const MAX_SENT: usize = 1 << 14;
/// Short: a peer that waits for bytes that never come is not worth a fuzzer's time.
const PATIENCE: Duration = Duration::from_millis(300);

/// Reads `bytes` as one frame, as a peer would.
pub fn frame(bytes: &[u8]) {
    let Some((head, payload)) = bytes.split_first_chunk::<HEADER_LEN>() else { return };
    let Ok(header) = Header::decode(head) else { return };
    assert_eq!(Header::decode(&header.encode()), Ok(header.clone()));
    match header.kind {
        FrameKind::Hello => {
            if let Some(Ok(hello)) = payload.first_chunk().map(Hello::decode) {
                assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
            }
        }
        FrameKind::Challenge => {
            if let Some(Ok(challenge)) = payload.first_chunk().map(Challenge::decode) {
                assert_eq!(Challenge::decode(&challenge.encode()), Ok(challenge));
            }
        }
        FrameKind::Pull => {
            let read = |head| PullHead::decode(head, header.length);
            if let Some(Ok(pull)) = payload.first_chunk().map(read) {
                assert_eq!(read(&pull.encode()), Ok(pull.clone()));
                let parts = PullHead::LEN + 4 * pull.n_counts as usize + 8 * pull.n_ids;
                assert_eq!(parts as u64, header.length);
            }
        }
        FrameKind::Push => {
            let read = |head| PushHead::decode(head, header.length);
            if let Some(Ok(push)) = payload.first_chunk().map(read) {
                assert_eq!(read(&push.encode()), Ok(push.clone()));
                let floats = push.n_dense + push.n_grads;
                let parts = PushHead::LEN + 4 * (push.n_counts as usize + floats) + 8 * push.n_ids;
                assert_eq!(parts as u64, header.length);
            }
        }
        FrameKind::Piece => {
            let read = |head| PieceHead::decode(head, header.length);
            if let Some(Ok(piece)) = payload.first_chunk().map(read) {
                assert_eq!((PieceHead::LEN + 4 * piece.n_floats) as u64, header.length);
            }
        }
        FrameKind::Refused => {
            if let Ok((refusal, sequence)) = decode_refusal(payload) {
                // Lossy text may grow past the limit and be truncated; only the numbers are equal.
                let again =
                    decode_refusal(&encode_refusal(&refusal, sequence)).map(|(_, number)| number);
                assert_eq!(again, Ok(sequence));
            }
        }
        FrameKind::Join => {
            if let Some(Ok(join)) = payload.first_chunk().map(Join::decode) {
                assert_eq!(Join::decode(&join.encode()), Ok(join));
            }
        }
        FrameKind::Proof
        | FrameKind::Accepted
        | FrameKind::Ack
        | FrameKind::Enter
        | FrameKind::Exchange
        | FrameKind::Blob
        | FrameKind::Bytes
        | FrameKind::Part
        | FrameKind::Sum
        | FrameKind::Region
        | FrameKind::Ready
        | FrameKind::Summed
        | FrameKind::Waiting => {}
    }
}

/// A peer without the key sends `bytes` and closes. Neither half of a handshake accepts them.
pub fn stranger(bytes: &[u8]) {
    let key = JobKey::from_bytes([3; 32]);
    let accept = |run| server::accept(Arc::new(sent(bytes)), &key, run);
    assert!(accept(Some((RUN, Encryption::default()))).is_err(), "a stranger was let in");
    assert!(accept(None).is_err(), "nothing is served yet");
    let dialed = party(&key).dial(sent(bytes), Role::Push, ClientId([5; 16]));
    assert!(dialed.is_err(), "a stranger passed for a server");
}

/// Client and server hold the key, and `bytes` say how the connection between them is tampered with:
/// four bytes for every change, which are direction and kind, place (two bytes) and value. What
/// arrives is what was sent, or an error.
pub fn relay(bytes: &[u8]) {
    let key = JobKey::from_bytes([3; 32]);
    let ((client, client_end), (server_end, server)) = (pair(), pair());
    let stream = |end: UnixStream| Stream::unix(end).expect("a fresh socket can be set up");
    let (client, server) = (stream(client), Arc::new(stream(server)));
    thread::scope(|scope| {
        scope.spawn(|| {
            let dialed = party(&key).dial(client, Role::Push, ClientId([5; 16]));
            let mut connection = dialed.ok()?;
            let floats: &[u8] = bytemuck::cast_slice(&PUSHED);
            let head = push_head().encode();
            connection
                .sender
                .send(FrameKind::Push, GENERATION, BatchId::default(), &[&head, floats])
                .ok()
        });
        scope.spawn(|| forward(&client_end, &server_end, bytes, 0));
        scope.spawn(|| forward(&server_end, &client_end, bytes, 1));
        if let Ok(mut connection) = party(&key).accept(server) {
            check_push(&mut connection);
        }
    });
}

fn push_head() -> PushHead {
    PushHead { n_dense: PUSHED.len(), ..PushHead::default() }
}

/// A push that arrives is the one that was sent, and the only one.
fn check_push(connection: &mut Connection) {
    let Ok(push) = PushRequest::read(&mut connection.receiver, Body::default()) else { return };
    assert_eq!(push.generation, GENERATION, "the header of a push has changed");
    assert_eq!(push.head, push_head(), "the head of a push has changed");
    assert_eq!(push.body.dense, PUSHED, "the numbers of a push have changed");
    let again = PullRequest::default().read(&mut connection.receiver);
    assert!(again.is_err(), "nothing more was sent");
}

fn party(key: &JobKey) -> Party<'_> {
    let encryption = Encryption::default();
    Party { key, run: RUN, encryption, timeout: PATIENCE, patience: PATIENCE }
}

fn pair() -> (UnixStream, UnixStream) {
    UnixStream::pair().expect("a process may have a few sockets")
}

/// A connection whose peer has sent `bytes` and hung up.
fn sent(bytes: &[u8]) -> Stream {
    let (mut peer, ours) = pair();
    // No more than a socket holds while it is not read.
    let _ = peer.write_all(&bytes[..bytes.len().min(MAX_SENT)]);
    Stream::unix(ours).expect("a fresh socket can be set up")
}

/// Passes bytes on, with the changes for this direction, until one end closes.
fn forward(mut from: &UnixStream, mut to: &UnixStream, changes: &[u8], direction: u8) {
    let mut at = 0_usize;
    let mut buffer = [0; 4096];
    let mut pass_on = || -> io::Result<bool> {
        let n = from.read(&mut buffer)?;
        let mut passed = buffer[..n].to_vec();
        for [kind, low, high, value] in changes.as_chunks().0 {
            let place = usize::from(u16::from_le_bytes([*low, *high])).wrapping_sub(at);
            if kind & 1 != direction || place >= passed.len() {
                continue;
            }
            match kind >> 1 & 3 {
                0 | 1 => passed[place] ^= value,
                2 => passed.truncate(place),
                _ => passed.insert(place, *value),
            }
        }
        at += n;
        to.write_all(&passed)?;
        Ok(n > 0 && passed.len() >= n)
    };
    while pass_on().unwrap_or(false) {}
    // A reader that waits for more learns that nothing will come.
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
