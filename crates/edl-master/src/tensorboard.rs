// SPDX-License-Identifier: Apache-2.0
//! TensorBoard's event files: TFRecord frames around small protobuf messages.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use prost::Message;

/// An event file being written.
pub(crate) struct EventFile {
    file: File,
}

#[derive(Clone, PartialEq, Message)]
struct TfEvent {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
struct SummaryValue {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, tag = "2")]
    simple_value: f32,
}

impl EventFile {
    /// Starts a new file; each start of a master has its own, and readers join them.
    pub(crate) fn create(folder: &Path, wall_time: f64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let name = format!("events.out.tfevents.{wall_time:.6}.{}.elasticdl", std::process::id());
        let mut file = Self { file: File::create(folder.join(name))? };
        let version = Some("brain.Event:2".into());
        file.write(&TfEvent { wall_time, step: 0, file_version: version, summary: None })?;
        Ok(file)
    }

    pub(crate) fn scalar(
        &mut self,
        tag: &str,
        step: u64,
        value: f64,
        wall_time: f64,
    ) -> io::Result<()> {
        #[expect(clippy::cast_possible_truncation, reason = "TensorBoard keeps single precision")]
        let value = SummaryValue { tag: tag.into(), simple_value: value as f32 };
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let summary = Some(Summary { values: vec![value] });
        self.write(&TfEvent { wall_time, step, file_version: None, summary })
    }

    fn write(&mut self, event: &TfEvent) -> io::Result<()> {
        let body = event.encode_to_vec();
        let length = (body.len() as u64).to_le_bytes();
        let mut frame = Vec::with_capacity(body.len() + 16);
        frame.extend(length);
        frame.extend(masked_crc(&length).to_le_bytes());
        frame.extend(&body);
        frame.extend(masked_crc(&body).to_le_bytes());
        self.file.write_all(&frame)
    }
}

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}
