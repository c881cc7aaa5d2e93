// SPDX-License-Identifier: Apache-2.0
//! A span that has not ended.

use edl_core::id::RunId;
use edl_core::job::EventKind;
use edl_net::otlp::span::{Event, SpanKind};
use edl_net::otlp::status::StatusCode;
use edl_net::otlp::{KeyValue, Span, Status};

use super::Nanos;

/// Events of a span, at most.
pub(super) const MAX_EVENTS: usize = 16;

/// What is known of it so far.
#[derive(Clone, Debug)]
pub(super) struct OpenSpan {
    pub(super) name: &'static str,
    pub(super) id: Vec<u8>,
    pub(super) parent: Vec<u8>,
    pub(super) start: Nanos,
    pub(super) attributes: Vec<KeyValue>,
    events: Vec<Event>,
    dropped_events: u32,
}

impl OpenSpan {
    pub(super) fn new(name: &'static str, id: Vec<u8>, parent: Vec<u8>, start: Nanos) -> Self {
        let (attributes, events) = (Vec::new(), Vec::new());
        Self { name, id, parent, start, attributes, events, dropped_events: 0 }
    }

    pub(super) fn note(&mut self, kind: EventKind, text: &str, now: Nanos) {
        if self.events.len() == MAX_EVENTS {
            self.dropped_events += 1;
            return;
        }
        let attributes = vec![KeyValue::text("elasticdl.text", text)];
        self.events.push(Event { time_unix_nano: now, name: kind.name().into(), attributes });
    }

    pub(super) fn add(&mut self, more: impl IntoIterator<Item = KeyValue>) {
        self.attributes.extend(more);
    }

    pub(super) fn end(self, run: RunId, now: Nanos, error: Option<String>) -> Span {
        let status = match error {
            Some(message) => Status { message, code: StatusCode::Error.into() },
            None => Status { message: String::new(), code: StatusCode::Ok.into() },
        };
        Span {
            trace_id: run.0.to_vec(),
            span_id: self.id,
            parent_span_id: self.parent,
            name: self.name.into(),
            kind: SpanKind::Internal.into(),
            start_time_unix_nano: self.start,
            // Clocks can be set back.
            end_time_unix_nano: now.max(self.start),
            attributes: self.attributes,
            events: self.events,
            dropped_events_count: self.dropped_events,
            status: Some(status),
        }
    }
}
