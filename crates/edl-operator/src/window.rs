// SPDX-License-Identifier: Apache-2.0
//! What the operator shows of itself: its last look, and what was before. Text is made when
//! somebody asks, once per look, so that a page that nobody opens costs nothing.

use std::sync::{Arc, Mutex, MutexGuard};

use axum::body::Bytes;
use serde_json::json;

use crate::history::{History, Sample};
use crate::overview::Look;

/// The operator puts looks in, pages take text out.
#[derive(Clone, Default)]
pub struct Window {
    shown: Arc<Mutex<Shown>>,
    /// Held while text is made: others wait for it instead of making the same.
    text: Arc<tokio::sync::Mutex<Option<Text>>>,
}

#[derive(Clone, Default)]
struct Shown {
    leads: bool,
    look: Option<Arc<Look>>,
    history: History,
    /// Grows with every change.
    version: u64,
}

/// All of it as JSON.
#[derive(Clone, Debug)]
pub struct Text {
    /// Two texts of one operator with the same version are the same.
    pub version: u64,
    pub json: Bytes,
}

impl Window {
    /// Whether this operator acts.
    pub fn leads(&self, leads: bool) {
        let mut shown = self.shown();
        if shown.leads != leads {
            shown.leads = leads;
            shown.version += 1;
        }
    }

    /// Shows a new look.
    pub fn show(&self, look: Look) {
        let sample = Sample::new(&look.observed, &look.plan);
        let mut shown = self.shown();
        shown.history.note(&sample);
        shown.look = Some(Arc::new(look));
        shown.version += 1;
    }

    /// What there is to see now; none if it cannot be written.
    pub async fn text(&self) -> Option<Text> {
        let mut kept = self.text.lock().await;
        let version = self.shown().version;
        if let Some(text) = kept.as_ref().filter(|text| text.version == version) {
            return Some(text.clone());
        }
        let shown = self.shown().clone();
        let text = tokio::task::spawn_blocking(move || shown.text()).await.ok()?;
        *kept = Some(text.clone());
        Some(text)
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        // Whoever panicked with it has left it whole: every change is one assignment.
        self.shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Shown {
    fn text(&self) -> Text {
        let overview = self.look.as_ref().map(|look| look.overview());
        let all = json!({
            "leads": self.leads,
            "cluster": overview,
            "history": self.history.to_json(),
        });
        Text { version: self.version, json: all.to_string().into() }
    }
}
