// SPDX-License-Identifier: Apache-2.0
//! Does what was decided. Every call has a deadline; what was done before is not done twice; what
//! is not ours is never touched.

use std::fmt::Debug;

use edl_core::spec::JobSpec;
use edl_kube::manifest::{self, JobObjects};
use edl_kube::{CALL_LIMIT, names};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::act::{Action, Deed, Target, Told};
use crate::crd::{API_VERSION, KIND, Status, TrainingJob};

/// Whose fields they are that we write.
pub const FIELD_MANAGER: &str = "elasticdl-operator";
/// Longer notes are refused.
const MAX_NOTE: usize = 1000;

/// Makes the key of a new job.
pub type NewKey = fn() -> Result<String, String>;

/// Speaks to the API server.
#[derive(Clone)]
pub struct Hands {
    pub client: Client,
    pub masters_outside: bool,
    pub new_key: NewKey,
    /// Who we are, for events.
    pub identity: String,
}

/// A ConfigMap that the watches will show in this version or a later one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    pub namespace: String,
    pub name: String,
    pub version: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {verb} {what}")]
    Call { verb: &'static str, what: String, source: Box<kube::Error> },
    #[error("cannot {verb} {what}: no response within {} s", CALL_LIMIT.as_secs())]
    Late { verb: &'static str, what: String },
    #[error("cannot create the job's objects: {0}")]
    Invalid(String),
    #[error("cannot create the job's key: {0}")]
    Key(String),
}

impl Hands {
    /// Performs one action; what the watches must show before the next plan is the answer.
    pub async fn perform(&self, action: &Action) -> Result<Option<Promise>, Error> {
        let job = &action.job;
        match &action.deed {
            Deed::Admit { spec, workers, remove } => {
                if let Some((name, uid)) = remove {
                    self.delete_pod(job, name, uid, Some(0)).await?;
                }
                self.admit(job, spec, *workers).await.map(Some)
            }
            Deed::Resize { workers, leave } => {
                let leave: Vec<String> = leave.iter().map(ToString::to_string).collect();
                let leave = Some(leave.join(",")).filter(|leave| !leave.is_empty());
                let notes =
                    json!({ names::WORKERS_NOTE: workers.to_string(), names::LEAVE_NOTE: leave });
                self.note(job, notes).await.map(Some)
            }
            Deed::Stop { pods } => {
                // What a master said before it was stopped is not what it says when it goes on.
                let notes = json!({ names::WORKERS_NOTE: "0", names::LEAVE_NOTE: null,
                    names::STATUS_NOTE: null });
                let promise = self.note(job, notes).await?;
                for (name, uid) in pods {
                    self.delete_pod(job, name, uid, None).await?;
                }
                Ok(Some(promise))
            }
            Deed::Show(status) => self.show(job, status).await.map(|()| None),
            Deed::Tell(told) => self.tell(job, told).await.map(|()| None),
        }
    }

    /// The note comes before the master, which looks for it when it starts, and after all else,
    /// so that a job that has it lacks nothing but its master.
    async fn admit(&self, job: &Target, spec: &JobSpec, workers: u32) -> Result<Promise, Error> {
        let key = (self.new_key)().map_err(Error::Key)?;
        let objects = manifest::job_objects(spec, &key);
        let mut objects = objects.map_err(|invalid| Error::Invalid(invalid.0))?;
        objects.config_map.metadata.owner_references = Some(vec![job.owner.clone()]);
        let made = self.apply(job, "configmap", &objects.config_map).await?;
        if let Some(owner) = manifest::owner(&made) {
            objects.own(&owner);
        }
        let JobObjects { secret, service, network_policy, budgets, master, .. } = &objects;
        // A key that is there stays: the job's processes have it.
        self.create::<Secret>(job, "secret", secret).await?;
        self.apply(job, "service", service).await?;
        self.apply(job, "networkpolicy", network_policy).await?;
        for budget in budgets {
            self.apply(job, "poddisruptionbudget", budget).await?;
        }
        let promise = self.note(job, json!({ names::WORKERS_NOTE: workers.to_string() })).await?;
        if !self.masters_outside {
            self.create::<Pod>(job, "pod", master).await?;
        }
        Ok(promise)
    }

    /// Writes notes on the job's ConfigMap; null takes one away.
    async fn note(&self, job: &Target, notes: Value) -> Result<Promise, Error> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &job.namespace);
        let name = names::config_map(&job.name);
        let patch = Patch::Merge(json!({ "metadata": { "annotations": notes } }));
        // A merge, not an apply: that would claim the description together with the note.
        let params =
            PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        let call = api.patch(&name, &params, &patch);
        let map = within("annotate", what("configmap", job, &name), call).await?;
        let version = map.resource_version().unwrap_or_default();
        Ok(Promise { namespace: job.namespace.clone(), name, version })
    }

    async fn show(&self, job: &Target, status: &Status) -> Result<(), Error> {
        let api: Api<TrainingJob> = Api::namespaced(self.client.clone(), &job.namespace);
        let patch = Patch::Apply(json!({
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": { "name": job.name },
            "status": status,
        }));
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let call = api.patch_status(&job.name, &params, &patch);
        within("update the status of", what("trainingjob", job, &job.name), call).await.map(drop)
    }

    async fn tell(&self, job: &Target, told: &Told) -> Result<(), Error> {
        let now = Timestamp::now();
        let event = Event {
            metadata: ObjectMeta {
                name: Some(format!("{}.{:x}", job.name, now.as_nanosecond())),
                namespace: Some(job.namespace.clone()),
                ..ObjectMeta::default()
            },
            action: Some(told.reason.into()),
            reason: Some(told.reason.into()),
            note: Some(shortened(&told.note).to_owned()),
            type_: Some(if told.is_warning { "Warning" } else { "Normal" }.into()),
            regarding: Some(job.object.clone()),
            event_time: Some(MicroTime(now)),
            reporting_controller: Some(FIELD_MANAGER.into()),
            reporting_instance: Some(self.identity.clone()),
            ..Event::default()
        };
        self.create::<Event>(job, "event", &event).await
    }

    async fn delete_pod(
        &self,
        job: &Target,
        name: &str,
        uid: &str,
        grace: Option<u32>,
    ) -> Result<(), Error> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &job.namespace);
        let params = DeleteParams {
            grace_period_seconds: grace,
            // This very pod, and never one of the same name that came after it.
            preconditions: Some(Preconditions { uid: Some(uid.into()), resource_version: None }),
            ..DeleteParams::default()
        };
        let deleted = within("delete", what("pod", job, name), api.delete(name, &params)).await;
        match deleted {
            Err(Error::Call { source, .. }) if is_code(&source, &[404, 409]) => Ok(()),
            done => done.map(drop),
        }
    }

    async fn apply<K: Ours>(&self, job: &Target, kind: &str, object: &K) -> Result<K, Error> {
        let api: Api<K> = Api::namespaced(self.client.clone(), &job.namespace);
        let name = object.name_any();
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(object);
        within("apply", what(kind, job, &name), api.patch(&name, &params, &patch)).await
    }

    /// Makes an object; one of that name may be there.
    async fn create<K: Ours>(&self, job: &Target, kind: &str, object: &K) -> Result<(), Error> {
        let api: Api<K> = Api::namespaced(self.client.clone(), &job.namespace);
        let params =
            PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() };
        let call = api.create(&params, object);
        match within("create", what(kind, job, &object.name_any()), call).await {
            Err(Error::Call { source, .. }) if is_code(&source, &[409]) => Ok(()),
            done => done.map(drop),
        }
    }
}

/// What objects of a namespace are, to the client.
trait Ours:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
{
}

impl<K> Ours for K where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned
{
}

/// A call with a deadline.
pub(crate) async fn within<T>(
    verb: &'static str,
    what: String,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(CALL_LIMIT, call).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(source)) => Err(Error::Call { verb, what, source: Box::new(source) }),
        Err(_) => Err(Error::Late { verb, what }),
    }
}

fn what(kind: &str, job: &Target, name: &str) -> String {
    format!("{kind} `{}/{name}`", job.namespace)
}

pub(crate) fn is_code(error: &kube::Error, codes: &[u16]) -> bool {
    matches!(error, kube::Error::Api(status) if codes.contains(&status.code))
}

fn shortened(note: &str) -> &str {
    let end = note.char_indices().map(|(at, _)| at).take_while(|at| *at < MAX_NOTE).last();
    if note.len() <= MAX_NOTE { note } else { &note[..end.unwrap_or(0)] }
}

#[cfg(test)]
mod tests;
