// SPDX-License-Identifier: Apache-2.0
//! Encrypted frames on their way: what was sent comes out, or nothing.

use std::io::{Read as _, Write as _};

use proptest::prelude::*;

use super::*;
use crate::cipher::{CHUNK, Cipher};
use crate::frame::MAX_PAYLOAD;

const RUN: RunId = RunId([1; 16]);
const PATIENCE: Duration = Duration::from_secs(60);

fn guard() -> Guard {
    Guard::Encrypted(Cipher::new([1; 32]))
}

/// The bytes that a sender of these payloads writes. A payload has several parts.
fn sent(payloads: &[Vec<Vec<u8>>]) -> Vec<u8> {
    let (end, mut wire) = UnixStream::pair().unwrap();
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        wire.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let mut sender = Sender::new(Arc::new(Stream::unix(end).unwrap()), RUN, PATIENCE);
    sender.guard(guard());
    for parts in payloads {
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        sender.send(FrameKind::Push, Generation(1), BatchId::default(), &parts).unwrap();
    }
    drop(sender);
    reader.join().unwrap()
}

/// The pieces that these bytes consist of: per payload a header, then its chunks.
fn pieces(mut bytes: &[u8], payloads: &[Vec<Vec<u8>>]) -> Vec<Vec<Vec<u8>>> {
    let mut cut = |n: usize| {
        let (piece, rest) = bytes.split_at(n);
        bytes = rest;
        piece.to_vec()
    };
    let frames = payloads.iter().map(|parts| {
        let mut left = parts.concat().len();
        let mut pieces = vec![cut(HEADER_LEN)];
        while left > 0 {
            let n = left.min(CHUNK);
            pieces.push(cut(n + TAG_LEN));
            left -= n;
        }
        pieces
    });
    let frames = frames.collect();
    assert!(bytes.is_empty(), "every byte is in a piece");
    frames
}

/// The payloads that a receiver of these bytes accepts, read in parts of `step` bytes.
fn received(bytes: Vec<u8>, step: usize) -> Vec<Vec<u8>> {
    let (mut wire, end) = UnixStream::pair().unwrap();
    let writer = std::thread::spawn(move || {
        // The receiver hangs up at the first piece that it does not believe.
        let _ = wire.write_all(&bytes);
    });
    let mut receiver = Receiver::new(Arc::new(Stream::unix(end).unwrap()), RUN, PATIENCE);
    receiver.guard(guard());
    let mut next = || -> Result<Vec<u8>, Error> {
        let header = receiver.header(&mut || Ok(()))?;
        let mut payload = vec![0; usize::try_from(header.length).unwrap()];
        for part in payload.chunks_mut(step) {
            receiver.fill(part)?;
        }
        receiver.finish()?;
        Ok(payload)
    };
    let accepted = std::iter::from_fn(|| next().ok()).collect();
    drop(receiver);
    writer.join().unwrap();
    accepted
}

fn payload() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let length = prop_oneof![
        4 => 0..100_usize,
        2 => CHUNK - 20..CHUNK + 20,
        1 => 2 * CHUNK - 20..2 * CHUNK + 20,
    ];
    let part = (length, any::<u8>())
        .prop_map(|(length, first)| (0..=255).cycle().skip(first.into()).take(length).collect());
    prop::collection::vec(part, 0..4)
}

fn step() -> impl Strategy<Value = usize> {
    prop_oneof![1000..5000_usize, CHUNK - 5..CHUNK + 5, Just(usize::MAX)]
}

#[derive(Clone, Debug)]
enum Change {
    Flip { at: usize, bit: u8 },
    Drop,
    Repeat,
    Swap,
    Truncate { at: usize },
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        (any::<usize>(), 0..8_u8).prop_map(|(at, bit)| Change::Flip { at, bit }),
        Just(Change::Drop),
        Just(Change::Repeat),
        Just(Change::Swap),
        any::<usize>().prop_map(|at| Change::Truncate { at }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_frames_are_read_as_they_were_sent_however_they_are_split(
        payloads in prop::collection::vec(payload(), 1..4), step in step(),
    ) {
        let whole: Vec<Vec<u8>> = payloads.iter().map(|parts| parts.concat()).collect();
        prop_assert!(received(sent(&payloads), step) == whole);
    }

    #[test]
    fn nothing_is_accepted_from_the_first_piece_on_that_was_changed_or_moved(
        payloads in prop::collection::vec(payload(), 1..4), step in step(),
        place in any::<usize>(), change in change(),
    ) {
        let frames = pieces(&sent(&payloads), &payloads);
        let mut wire = frames.concat();
        let place = place % wire.len();
        // The first piece that is not what the receiver expects there.
        let mut wrong = place;
        match change {
            Change::Flip { at, bit } => {
                let at = at % wire[place].len();
                wire[place][at] ^= 1 << bit;
            }
            Change::Drop => drop(wire.remove(place)),
            Change::Repeat => {
                wire.insert(place, wire[place].clone());
                wrong += 1;
            }
            Change::Swap if place + 1 < wire.len() => wire.swap(place, place + 1),
            Change::Swap => wrong += 1,
            Change::Truncate { at } => {
                let at = at % wire[place].len();
                wire.truncate(place + 1);
                wire[place].truncate(at);
            }
        }
        let ends = frames.iter().scan(0, |n_pieces, frame| {
            *n_pieces += frame.len();
            Some(*n_pieces)
        });
        let n_genuine = ends.filter(|end| *end <= wrong).count();
        let whole: Vec<Vec<u8>> = payloads.iter().map(|parts| parts.concat()).collect();
        prop_assert!(received(wire.concat(), step) == whole[..n_genuine]);
    }
}

#[test]
fn a_frame_that_claims_less_than_it_is_asked_for_is_refused() {
    let bytes = sent(&[vec![vec![7; 10]]]);
    let (mut wire, end) = UnixStream::pair().unwrap();
    wire.write_all(&bytes).unwrap();
    let mut receiver = Receiver::new(Arc::new(Stream::unix(end).unwrap()), RUN, PATIENCE);
    receiver.guard(guard());
    receiver.header(&mut || Ok(())).unwrap();
    receiver.fill(&mut [0_u8; 6]).unwrap();
    assert!(matches!(receiver.fill(&mut [0_u8; 5]), Err(Error::Forged { sequence: 1 })));
}

#[test]
fn memory_grows_with_the_numbers_that_arrive_not_with_the_length_of_the_frame() {
    let length = usize::try_from(MAX_PAYLOAD).unwrap();
    let header = Header {
        kind: FrameKind::Push,
        run: RUN,
        generation: Generation(1),
        sequence: 0,
        batch: BatchId::default(),
        length: MAX_PAYLOAD,
        tag: [0; TAG_LEN],
    };
    let header = header.encode();
    for n_sent in [0, 1000, 3 << 20] {
        let (mut wire, end) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            wire.write_all(&header).unwrap();
            wire.write_all(&vec![7; n_sent]).unwrap();
        });
        let mut receiver = Receiver::new(Arc::new(Stream::unix(end).unwrap()), RUN, PATIENCE);
        receiver.header(&mut || Ok(())).unwrap();
        let mut numbers: Vec<f32> = Vec::new();
        assert!(matches!(receiver.fill_vec(&mut numbers, length / 4), Err(Error::Closed)));
        let claimed = 4 * numbers.capacity();
        assert!(claimed <= 2 * n_sent + FIRST_CLAIM, "{claimed} bytes for {n_sent}");
        writer.join().unwrap();
    }
}

#[test]
fn a_buffer_is_used_again_for_numbers_of_any_length() {
    let lengths = [10, 3 * CHUNK, 100, 0, CHUNK + 1];
    let payloads: Vec<Vec<u8>> =
        lengths.iter().map(|n| (0..=255).cycle().skip(n % 7).take(*n).collect()).collect();
    let bytes = sent(&payloads.iter().map(|payload| vec![payload.clone()]).collect::<Vec<_>>());
    let (mut wire, end) = UnixStream::pair().unwrap();
    let writer = std::thread::spawn(move || wire.write_all(&bytes).unwrap());
    let mut receiver = Receiver::new(Arc::new(Stream::unix(end).unwrap()), RUN, PATIENCE);
    receiver.guard(guard());
    let mut buffer: Vec<u8> = Vec::new();
    for payload in payloads {
        receiver.header(&mut || Ok(())).unwrap();
        receiver.fill_vec(&mut buffer, payload.len()).unwrap();
        receiver.finish().unwrap();
        assert!(buffer == payload, "{} bytes", payload.len());
    }
    writer.join().unwrap();
}

#[test]
fn addresses_of_this_host_and_others_are_distinguished() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let stream = Stream::connect_tcp(&address.to_string(), PATIENCE).unwrap();
    assert!(stream.is_same_host());
    assert_eq!(stream.ends().1, address.to_string());
    let (end, _other) = UnixStream::pair().unwrap();
    assert!(Stream::unix(end).unwrap().is_same_host());
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    for (here, there, is_same) in [
        ("127.0.0.1", "127.0.0.2", true),
        ("::1", "::1", true),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", true),
        ("10.1.2.3", "10.1.2.3", true),
        ("10.1.2.3", "::ffff:10.1.2.3", true),
        ("10.1.2.3", "10.1.2.4", false),
        ("fd00::1", "fd00::2", false),
    ] {
        assert_eq!(is_one_host(ip(here), ip(there)), is_same, "{here} {there}");
    }
}
