// SPDX-License-Identifier: Apache-2.0
//! The lines about evaluations that users look for in logs.

use std::fmt::Write;

use edl_core::evaluation::Evaluated;
use edl_core::text::decimal;

pub(crate) fn started(n_records: u64) {
    if n_records > 0 {
        tracing::info!("Evaluation service started");
    }
}

pub(crate) fn begin(version: u64) {
    tracing::info!(version, "evaluation started");
}

pub(crate) fn complete(evaluated: &Evaluated) {
    tracing::info!("{}", line(evaluated));
}

pub(crate) fn stopped(n_records: u64) {
    if n_records > 0 {
        tracing::info!("Evaluation service stopped");
    }
}

/// `Evaluation metrics[v=50]: {'accuracy': 0.7712}`: the form that tools search for.
fn line(evaluated: &Evaluated) -> String {
    let mut values = String::new();
    for (name, value) in &evaluated.metrics {
        let comma = if values.is_empty() { "" } else { ", " };
        write!(values, "{comma}'{name}': {}", decimal(*value)).expect("a string takes everything");
    }
    format!("Evaluation metrics[v={}]: {{{values}}}", evaluated.version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_has_the_form_that_tools_search_for() {
        let metrics = [("accuracy".to_owned(), 0.77123), ("loss".to_owned(), 1.0)].into();
        let evaluated = Evaluated { version: 50, epoch: 0, metrics, is_best: true };
        assert_eq!(
            line(&evaluated),
            "Evaluation metrics[v=50]: {'accuracy': 0.7712, 'loss': 1.0000}"
        );
    }
}
