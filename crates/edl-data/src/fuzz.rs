// SPDX-License-Identifier: Apache-2.0
//! Entry points for fuzzers: whatever the bytes are, these return.

use crate::example::Example;
use crate::{recordio, tfrecord};

/// Reads bytes as a RecordIO file. What can be read can be written and read again.
pub fn recordio(bytes: &[u8]) {
    let Ok(chunks) = recordio::parse(bytes) else { return };
    for chunk in chunks {
        let records: Vec<&[u8]> = chunk.iter().collect();
        let written = recordio::encode(&records, recordio::Compressor::None);
        let Ok(written) = written else { continue };
        let again = recordio::parse(&written);
        let same = again.is_ok_and(|again| again.first() == Some(&chunk) || chunk.is_empty());
        debug_assert!(same, "a chunk must survive being written");
    }
}

/// Reads bytes as a `tf.train.Example`. What can be read can be written and read again.
pub fn example(bytes: &[u8]) {
    let Ok(example) = Example::parse(bytes.to_vec()) else { return };
    let again = Example::parse(example.to_bytes()).map(|again| again.to_bytes());
    // Bytes are compared, not values: a NaN is not equal to itself.
    debug_assert_eq!(again.ok(), Some(example.to_bytes()), "an example must survive being written");
}

/// Reads bytes as a TFRecord file.
pub fn tfrecord(bytes: &[u8]) {
    drop(tfrecord::parse(bytes.to_vec()));
}
