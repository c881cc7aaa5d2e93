// SPDX-License-Identifier: Apache-2.0
//! Sends spans to a collector with the OpenTelemetry protocol over gRPC.

use std::time::Duration;

use tonic::transport::{Channel, ClientTlsConfig, Endpoint};

use crate::tls::choose_provider;

#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    unreachable_pub,
    unused_qualifications,
    reason = "generated code"
)]
#[path = "generated/opentelemetry.proto.collector.trace.v1.rs"]
#[rustfmt::skip]
mod generated;

pub use self::generated::*;

/// Why there can be no collector at such an address.
#[derive(Debug, thiserror::Error)]
#[error("invalid collector address `{endpoint}`; use http://host:4317")]
pub struct Error {
    endpoint: String,
    source: tonic::transport::Error,
}

/// A channel to the collector at `endpoint`, which is not called before it is used. The
/// certificate of one behind `https` must be known to this system.
pub fn channel(endpoint: &str, timeout: Duration) -> Result<Channel, Error> {
    choose_provider();
    let fail = |source| Error { endpoint: endpoint.into(), source };
    let mut calls = Endpoint::from_shared(endpoint.to_owned()).map_err(fail)?;
    if endpoint.starts_with("https:") {
        calls = calls.tls_config(ClientTlsConfig::new().with_native_roots()).map_err(fail)?;
    }
    Ok(calls.connect_timeout(timeout).timeout(timeout).connect_lazy())
}

impl KeyValue {
    #[must_use]
    pub fn text(key: &str, value: &str) -> Self {
        Self::of(key, any_value::Value::StringValue(value.into()))
    }

    /// A value that is too large for the protocol is sent as the maximum.
    #[must_use]
    pub fn number(key: &str, value: u64) -> Self {
        Self::of(key, any_value::Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)))
    }

    #[must_use]
    pub fn real(key: &str, value: f64) -> Self {
        Self::of(key, any_value::Value::DoubleValue(value))
    }

    fn of(key: &str, value: any_value::Value) -> Self {
        Self { key: key.into(), value: Some(AnyValue { value: Some(value) }) }
    }
}
