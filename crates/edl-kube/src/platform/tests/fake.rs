// SPDX-License-Identifier: Apache-2.0
//! An API server for pods, in memory: it lists, watches, makes and deletes them, and has a ConfigMap
//! for each job.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};

use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::watch;

/// Cheap to clone: all clones are one server.
#[derive(Clone)]
pub(super) struct Fake {
    state: Arc<Mutex<State>>,
    changed: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    pods: BTreeMap<String, Value>,
    /// The events of all watches; a version is a position in it.
    log: Vec<Value>,
    /// Watches from before this position must list again.
    oldest: usize,
    refusals: VecDeque<(u16, String)>,
    graces: Vec<u64>,
    n_made: u32,
}

impl Default for Fake {
    fn default() -> Self {
        Self { state: Arc::default(), changed: watch::Sender::new(0) }
    }
}

impl Fake {
    pub(super) fn client(&self) -> Client {
        let server = self.clone();
        let answer = move |request| {
            let server = server.clone();
            async move { Ok::<_, Infallible>(server.answer(request).await) }
        };
        Client::new(tower::service_fn(answer), "n")
    }

    /// The next call that is not a watch is refused.
    pub(super) fn refuse(&self, code: u16, message: &str) {
        self.state().refusals.push_back((code, message.into()));
    }

    pub(super) fn add(&self, name: &str, role: &str, uid: &str) {
        let labels = json!({"elasticdl_replica_type": role, "elasticdl_replica_index": "0"});
        let pod = json!({"metadata": {"name": name, "uid": uid, "labels": labels}});
        self.publish("ADDED", name, pod);
    }

    /// Changes a field of a pod.
    pub(super) fn set(&self, name: &str, path: &str, value: &str) {
        let mut pod = self.state().pods[name].clone();
        let (parent, field) = path.rsplit_once('/').expect("a path");
        if pod.pointer(parent).is_none() {
            pod[parent.trim_start_matches('/')] = json!({});
        }
        pod.pointer_mut(parent).expect("an object")[field] = value.into();
        self.publish("MODIFIED", name, pod);
    }

    /// Removes a pod without an event to any watch, and breaks the watches.
    pub(super) fn vanish(&self, name: &str) {
        let mut state = self.state();
        state.pods.remove(name);
        state.log.push(json!({}));
        state.oldest = state.log.len();
        self.changed.send_replace(state.log.len());
    }

    pub(super) fn get(&self, name: &str, path: &str) -> Value {
        self.state().pods[name].pointer(path).cloned().unwrap_or_default()
    }

    pub(super) fn uid(&self, name: &str) -> String {
        self.get(name, "/metadata/uid").as_str().unwrap_or_default().to_owned()
    }

    /// What deleted pods were given to leave.
    pub(super) fn graces(&self) -> Vec<u64> {
        self.state().graces.clone()
    }

    /// How many pods were created by calls.
    pub(super) fn n_made(&self) -> u32 {
        self.state().n_made
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics while it holds this")
    }

    fn publish(&self, kind: &str, name: &str, mut pod: Value) -> Value {
        let mut state = self.state();
        let version = state.log.len() + 1;
        pod["metadata"]["resourceVersion"] = version.to_string().into();
        state.log.push(json!({"type": kind, "object": pod}));
        match kind {
            "DELETED" => state.pods.remove(name),
            _ => state.pods.insert(name.into(), pod.clone()),
        };
        self.changed.send_replace(version);
        pod
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let name = head.uri.path().rsplit('/').next().unwrap_or_default().to_owned();
        let query = head.uri.query().unwrap_or_default().to_owned();
        let body = body.collect_bytes().await.unwrap_or_default();
        let is_watch = query.contains("watch=true");
        let refusal = if is_watch { None } else { self.state().refusals.pop_front() };
        if let Some((code, message)) = refusal {
            return failure(code, "Forbidden", &message);
        }
        match head.method {
            Method::POST => self.make(&serde_json::from_slice(&body).expect("a pod")),
            Method::DELETE => {
                self.delete(&name, &serde_json::from_slice(&body).unwrap_or_default())
            }
            _ if is_watch => self.watch(&query).await,
            _ if head.uri.path().contains("/configmaps/") => success(&config_map(&name)),
            _ => self.list(),
        }
    }

    fn list(&self) -> Response<Body> {
        let state = self.state();
        let items: Vec<&Value> = state.pods.values().collect();
        let version = state.log.len().to_string();
        success(&json!({"apiVersion": "v1", "kind": "PodList", "items": items,
                        "metadata": {"resourceVersion": version}}))
    }

    /// Answers when there is news, and ends; the next call asks for what came after.
    async fn watch(&self, query: &str) -> Response<Body> {
        let version = query.split('&').find_map(|word| word.strip_prefix("resourceVersion="));
        let version: usize = version.and_then(|word| word.parse().ok()).unwrap_or(0);
        let mut changed = self.changed.subscribe();
        let _ = changed.wait_for(|length| *length > version).await;
        let state = self.state();
        if version < state.oldest {
            let gone = status(410, "Expired", "too old");
            return success(&json!({"type": "ERROR", "object": gone}));
        }
        let lines: String = state.log[version..].iter().map(|event| format!("{event}\n")).collect();
        Response::new(Body::from(lines.into_bytes()))
    }

    fn make(&self, pod: &Value) -> Response<Body> {
        let name = pod["metadata"]["name"].as_str().expect("a name").to_owned();
        if self.state().pods.contains_key(&name) {
            return failure(409, "AlreadyExists", "it exists");
        }
        self.state().n_made += 1;
        let mut pod = pod.clone();
        pod["metadata"]["uid"] = format!("uid-{}", self.state().n_made).into();
        success(&self.publish("ADDED", &name, pod))
    }

    fn delete(&self, name: &str, options: &Value) -> Response<Body> {
        let Some(pod) = self.state().pods.get(name).cloned() else {
            return failure(404, "NotFound", "there is none");
        };
        if options["preconditions"]["uid"] != pod["metadata"]["uid"] {
            return failure(409, "Conflict", "another one");
        }
        let grace = options["gracePeriodSeconds"].as_u64().unwrap_or_default();
        self.state().graces.push(grace);
        success(&self.publish("DELETED", name, pod))
    }
}

fn config_map(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "uid": "job"}})
}

fn success(value: &Value) -> Response<Body> {
    Response::new(Body::from(value.to_string().into_bytes()))
}

fn failure(code: u16, reason: &str, message: &str) -> Response<Body> {
    let body = Body::from(status(code, reason, message).to_string().into_bytes());
    Response::builder().status(code).body(body).expect("a response")
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "metadata": {},
           "code": code, "reason": reason, "message": message})
}
