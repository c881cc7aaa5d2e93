// SPDX-License-Identifier: Apache-2.0
//! The data that the cluster page shows: the last pass and the history. JSON is only made on
//! request, once per pass, so a page that is not open costs nothing.

use std::sync::{Arc, Mutex, MutexGuard};

use axum::body::Bytes;
use serde_json::json;

use crate::history::{History, Sample};
use crate::overview::Pass;

/// Written by the operator, read by the HTTP server.
#[derive(Clone, Default)]
pub struct PageData {
    content: Arc<Mutex<Content>>,
    /// Locked while JSON is made: other requests wait for it instead of making it again.
    json: Arc<tokio::sync::Mutex<Option<Json>>>,
}

#[derive(Clone, Default)]
struct Content {
    leads: bool,
    pass: Option<Arc<Pass>>,
    history: History,
    /// Grows with every change.
    version: u64,
}

/// All data as JSON.
#[derive(Clone, Debug)]
pub struct Json {
    /// Equal versions of one process have equal contents.
    pub version: u64,
    pub text: Bytes,
}

impl PageData {
    /// Whether this operator acts.
    pub fn leads(&self, leads: bool) {
        let mut content = self.content();
        if content.leads != leads {
            content.leads = leads;
            content.version += 1;
        }
    }

    /// Shows a new pass.
    pub fn show(&self, pass: Pass) {
        let sample = Sample::new(&pass.observed, &pass.plan);
        let mut content = self.content();
        content.history.record(&sample);
        content.pass = Some(Arc::new(pass));
        content.version += 1;
    }

    /// The current data; none if it cannot be written.
    pub async fn json(&self) -> Option<Json> {
        let mut kept = self.json.lock().await;
        let version = self.content().version;
        if let Some(json) = kept.as_ref().filter(|json| json.version == version) {
            return Some(json.clone());
        }
        let content = self.content().clone();
        let json = tokio::task::spawn_blocking(move || content.json()).await.ok()?;
        *kept = Some(json.clone());
        Some(json)
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        // A panic cannot leave it inconsistent: every change is one assignment.
        self.content.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Content {
    fn json(&self) -> Json {
        let overview = self.pass.as_ref().map(|pass| pass.overview());
        let all = json!({
            "leads": self.leads,
            "cluster": overview,
            "history": self.history.to_json(),
        });
        Json { version: self.version, text: all.to_string().into() }
    }
}
