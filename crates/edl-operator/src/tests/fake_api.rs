// SPDX-License-Identifier: Apache-2.0
//! An API server for tests: it keeps what it is given and remembers how it was asked.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};

use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// Cheap to clone: all clones are one server.
#[derive(Clone, Default)]
pub(crate) struct FakeApi {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Objects by path.
    objects: BTreeMap<String, Value>,
    calls: Vec<String>,
    refusals: VecDeque<(u16, String)>,
    version: u32,
}

impl FakeApi {
    pub(crate) fn client(&self) -> Client {
        let server = self.clone();
        let answer = move |request| {
            let server = server.clone();
            async move { Ok::<_, Infallible>(server.answer(request).await) }
        };
        Client::new(tower::service_fn(answer), "n")
    }

    /// The next call is refused.
    pub(crate) fn refuse(&self, code: u16, message: &str) {
        self.state().refusals.push_back((code, message.into()));
    }

    /// The calls since the last time, one a line.
    pub(crate) fn calls(&self) -> String {
        std::mem::take(&mut self.state().calls).concat()
    }

    pub(crate) fn get(&self, path: &str, field: &str) -> Value {
        let state = self.state();
        let object = state.objects.get(path).cloned().unwrap_or_default();
        object.pointer(field).cloned().unwrap_or_default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics while it holds this")
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let body = body.collect_bytes().await.unwrap_or_default();
        let given: Value = serde_json::from_slice(&body).unwrap_or_default();
        let (code, answer) = self.state().answer(&head.method, head.uri.path(), &given);
        let text = serde_json::to_vec(&answer).expect("JSON");
        Response::builder().status(code).body(Body::from(text)).expect("a response")
    }
}

impl State {
    fn answer(&mut self, method: &Method, path: &str, given: &Value) -> (u16, Value) {
        self.calls.push(format!("{method} {path}\n"));
        if let Some((code, message)) = self.refusals.pop_front() {
            return refusal(code, &message);
        }
        let name = given["metadata"]["name"].as_str().unwrap_or_default();
        let path = if method == Method::POST { format!("{path}/{name}") } else { path.to_owned() };
        match *method {
            Method::GET => match self.objects.get(&path) {
                Some(object) => (200, object.clone()),
                None => refusal(404, "not found"),
            },
            Method::DELETE => {
                self.objects.remove(&path);
                (200, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}))
            }
            Method::POST if self.objects.contains_key(&path) => refusal(409, "already exists"),
            _ => (200, self.keep(path, given)),
        }
    }

    /// Replaces an object, or patches the existing one.
    fn keep(&mut self, path: String, given: &Value) -> Value {
        self.version += 1;
        let object = self.objects.entry(path).or_insert_with(|| json!({}));
        merge(object, given);
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        object["metadata"]["uid"] = "made".into();
        object.clone()
    }
}

fn merge(base: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *base = patch.clone();
        return;
    };
    if !base.is_object() {
        *base = json!({});
    }
    for (field, value) in patch {
        if value.is_null() {
            drop(base.as_object_mut().and_then(|base| base.remove(field)));
        } else {
            merge(&mut base[field], value);
        }
    }
}

fn refusal(code: u16, message: &str) -> (u16, Value) {
    let reason = if code == 404 { "NotFound" } else { "Conflict" };
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
        "reason": reason, "message": message});
    (code, status)
}
