// SPDX-License-Identifier: Apache-2.0
//! A link against a peer that holds the key and breaks the rules.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::*;
use crate::cipher::Cipher;
use crate::frame::MAX_PAYLOAD;
use crate::seal::Seal;

const WORLD: WorldId = WorldId(4);

fn link(stream: UnixStream, out: u8, into: u8, is_encrypted: bool) -> Link {
    let guard = |key| match is_encrypted {
        true => Guard::Encrypted(Cipher::new([key; 32])),
        false => Guard::Tagged(Seal::new([key; 32], true)),
    };
    let ends = Ends {
        stream: Arc::new(Stream::unix(stream).unwrap()),
        run: RunId([1; 16]),
        out: (guard(out), 1),
        into: (guard(into), 1),
    };
    Link::new((WorkerId(1), Incarnation(1)), 1, Transport::SharedMemory, ends)
}

fn pair(is_encrypted: bool) -> (Link, Link) {
    let (a, b) = UnixStream::pair().unwrap();
    (link(a, 1, 2, is_encrypted), link(b, 2, 1, is_encrypted))
}

/// Reads until a frame is whole, nothing is left, or an error comes.
fn next(link: &mut Link) -> Result<Option<Header>, Error> {
    loop {
        match link.read(&mut [])? {
            Got::Nothing => return Ok(None),
            Got::More => {}
            Got::Header => link.place(Target::Scratch),
            Got::Frame(header) => return Ok(Some(header)),
            Got::Dropped => panic!("placed in the scratch"),
        }
    }
}

/// The bytes of a frame that a link of this key and number would send.
fn bytes(sequence: u64, payload: &[u8], is_encrypted: bool) -> Vec<u8> {
    let (end, mut reader) = UnixStream::pair().unwrap();
    let mut sender = link(end, 1, 2, is_encrypted);
    sender.outbox.next = sequence;
    sender.post(FrameKind::Exchange, WORLD, 5, payload);
    assert!(sender.write(&[]).unwrap());
    drop(sender);
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    bytes
}

fn receive_frame(bytes: &[u8], is_encrypted: bool) -> Result<Option<Header>, Error> {
    let (mut writer, end) = UnixStream::pair().unwrap();
    let mut receiver = link(end, 2, 1, is_encrypted);
    writer.write_all(bytes).unwrap();
    next(&mut receiver)
}

#[test]
fn only_a_genuine_frame_is_received() {
    for is_encrypted in [false, true] {
        let receive_frame = |frame: &[u8]| receive_frame(frame, is_encrypted);
        let frame = bytes(1, b"hello", is_encrypted);
        assert!(matches!(receive_frame(&frame), Ok(Some(header)) if number(&header) == 5));
        assert!(matches!(receive_frame(&frame[..frame.len() - 1]), Ok(None)));
        // But for byte 7, which means nothing where it can be read.
        for place in (0..frame.len()).filter(|place| is_encrypted || *place != 7) {
            let mut altered = frame.clone();
            altered[place] ^= 1;
            // A longer length only makes it wait for what will never come.
            assert!(!matches!(receive_frame(&altered), Ok(Some(_))), "{place}");
        }
        let second = bytes(2, b"hello", is_encrypted);
        assert!(matches!(receive_frame(&second), Err(Error::Forged { sequence: 2 })));
        assert!(receive_frame(&[b'x'; 4096]).is_err());
    }
    assert!(matches!(receive_frame(&[b'x'; 4096], false), Err(Error::Frame(_))));
}

#[test]
fn an_encrypted_frame_shows_nothing_and_fits_only_its_own_place_and_direction() {
    let (first, second) = (bytes(1, b"hello, hello", true), bytes(1, b"", true));
    assert!(!first.windows(4).any(|part| part == b"EDLF" || part == b"hell"));
    for wrong in [[&first[..], &first].concat(), [&second[..], &first].concat()] {
        let (mut writer, end) = UnixStream::pair().unwrap();
        let mut receiver = link(end, 2, 1, true);
        writer.write_all(&wrong).unwrap();
        assert!(matches!(next(&mut receiver), Ok(Some(_))));
        assert!(matches!(next(&mut receiver), Err(Error::Forged { sequence: 2 })));
    }
    let (mut writer, end) = UnixStream::pair().unwrap();
    let mut sender = link(end, 1, 2, true);
    writer.write_all(&first).unwrap();
    assert!(matches!(next(&mut sender), Err(Error::Forged { sequence: 1 })));
}

#[test]
fn a_length_beyond_a_block_is_refused_before_memory_is_allocated() {
    for (kind, length) in [
        (FrameKind::Part, MAX_BLOCK + 1),
        (FrameKind::Push, MAX_PAYLOAD),
        (FrameKind::Exchange, 4097),
        (FrameKind::Sum, u64::MAX),
    ] {
        let mut frame = bytes(1, b"", false);
        frame[6] = kind as u8;
        frame[48..56].copy_from_slice(&length.to_le_bytes());
        assert!(matches!(receive_frame(&frame, false), Err(Error::Frame(_))));
    }
}

#[test]
fn a_frame_that_lost_its_memory_is_finished_from_a_copy() {
    for is_encrypted in [false, true] {
        let (mut a, mut b) = pair(is_encrypted);
        let block: Vec<u8> = (0..200_u8).cycle().take(200 << 10).collect();
        let mut n_posted = 0;
        // Until the peer's end is full in the middle of a frame.
        loop {
            a.begin(FrameKind::Part, WORLD, n_posted, &block);
            n_posted += 1;
            if !a.write(&block).unwrap() {
                break;
            }
        }
        a.settle(&block);
        a.post(FrameKind::Enter, WORLD.next(), 0, &[]);
        for expected in 0..n_posted {
            while !matches!(next(&mut b), Ok(Some(header)) if number(&header) == expected) {
                a.write(&[]).unwrap();
            }
            assert!(b.inbox.scratch == block);
        }
        a.write(&[]).unwrap();
        assert!(matches!(next(&mut b), Ok(Some(header)) if header.kind == FrameKind::Enter));
    }
}

#[test]
fn a_frame_of_an_ended_world_is_read_and_discarded() {
    for is_encrypted in [false, true] {
        let (mut a, mut b) = pair(is_encrypted);
        a.post(FrameKind::Part, WORLD, 0, &[1; 3000]);
        a.write(&[]).unwrap();
        assert!(matches!(b.read(&mut []), Ok(Got::Header)));
        b.place(Target::Caller);
        let mut room = [0; 3000];
        // As if its world ended now, with half of it in the caller's memory.
        b.inbox.incoming.as_mut().unwrap().n_read = 1500;
        let mut half = [0; 1500];
        rustix::net::recv(&b, half.as_mut_slice(), RecvFlags::empty()).unwrap();
        b.discard_payload();
        assert!(matches!(b.read(&mut room), Ok(Got::Dropped)));
        a.post(FrameKind::Enter, WORLD, 0, &[]);
        a.write(&[]).unwrap();
        assert!(matches!(next(&mut b), Ok(Some(header)) if header.kind == FrameKind::Enter));
    }
}

#[test]
fn of_many_descriptors_one_is_kept() {
    let (mut a, mut b) = pair(false);
    for _ in 0..50 {
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        a.post_fd(FrameKind::Region, WORLD, &[], Arc::new(fd));
        assert!(a.write(&[]).unwrap());
        assert!(next(&mut b).unwrap().is_some());
    }
    assert!(b.take_fd().is_some());
    assert!(b.take_fd().is_none());
}

#[test]
fn the_end_of_a_peer_is_noticed_after_its_last_frame() {
    for is_encrypted in [false, true] {
        let (mut a, mut b) = pair(is_encrypted);
        a.post(FrameKind::Enter, WORLD, 0, &[]);
        a.write(&[]).unwrap();
        drop(a);
        assert!(matches!(next(&mut b), Ok(Some(_))));
        assert!(matches!(next(&mut b), Err(Error::Closed)));
    }
}
