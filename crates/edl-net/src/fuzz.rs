// SPDX-License-Identifier: Apache-2.0
//! Entry points for fuzzers: foreign bytes must be refused, never believed and never a panic.

use crate::frame::{
    HEADER_LEN, Header, Kind, PieceHead, PullHead, PushHead, decode_refusal, encode_refusal,
};
use crate::handshake::{Challenge, Hello, Join};

/// Reads `bytes` as one frame, as a peer would.
pub fn frame(bytes: &[u8]) {
    let Some((head, payload)) = bytes.split_first_chunk::<HEADER_LEN>() else { return };
    let Ok(header) = Header::decode(head) else { return };
    assert_eq!(Header::decode(&header.encode()), Ok(header.clone()));
    match header.kind {
        Kind::Hello => {
            if let Some(Ok(hello)) = payload.first_chunk().map(Hello::decode) {
                assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
            }
        }
        Kind::Challenge => {
            if let Some(Ok(challenge)) = payload.first_chunk().map(Challenge::decode) {
                assert_eq!(Challenge::decode(&challenge.encode()), Ok(challenge));
            }
        }
        Kind::Pull => {
            let read = |head| PullHead::decode(head, header.length);
            if let Some(Ok(pull)) = payload.first_chunk().map(read) {
                assert_eq!(read(&pull.encode()), Ok(pull.clone()));
                let parts = PullHead::LEN + 4 * pull.n_counts as usize + 8 * pull.n_ids;
                assert_eq!(parts as u64, header.length);
            }
        }
        Kind::Push => {
            let read = |head| PushHead::decode(head, header.length);
            if let Some(Ok(push)) = payload.first_chunk().map(read) {
                assert_eq!(read(&push.encode()), Ok(push.clone()));
                let floats = push.n_dense + push.n_grads;
                let parts = PushHead::LEN + 4 * (push.n_counts as usize + floats) + 8 * push.n_ids;
                assert_eq!(parts as u64, header.length);
            }
        }
        Kind::Piece => {
            let read = |head| PieceHead::decode(head, header.length);
            if let Some(Ok(piece)) = payload.first_chunk().map(read) {
                assert_eq!((PieceHead::LEN + 4 * piece.n_floats) as u64, header.length);
            }
        }
        Kind::Refused => {
            if let Ok((refusal, sequence)) = decode_refusal(payload) {
                // Lossy text may grow past the limit and be cut, so only the numbers are equal.
                let again =
                    decode_refusal(&encode_refusal(&refusal, sequence)).map(|(_, number)| number);
                assert_eq!(again, Ok(sequence));
            }
        }
        Kind::Join => {
            if let Some(Ok(join)) = payload.first_chunk().map(Join::decode) {
                assert_eq!(Join::decode(&join.encode()), Ok(join));
            }
        }
        Kind::Proof
        | Kind::Accepted
        | Kind::Ack
        | Kind::Enter
        | Kind::Exchange
        | Kind::Blob
        | Kind::Bytes
        | Kind::Part
        | Kind::Sum
        | Kind::Region
        | Kind::Ready
        | Kind::Summed
        | Kind::Waiting => {}
    }
}
