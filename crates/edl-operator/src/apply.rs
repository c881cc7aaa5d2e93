// SPDX-License-Identifier: Apache-2.0
//! Performs actions. Every call has a deadline and can be repeated; objects of others are never
//! changed.

use edl_core::spec::JobSpec;
use edl_kube::manifest::{self, JobObjects};
use edl_kube::note::Grant;
use edl_kube::{CALL_LIMIT, Object, names};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::act::{Action, JobAction, JobEvent, Target};
use crate::crd::{API_VERSION, KIND, Status, TrainingJob};

/// The field manager of everything the operator writes.
pub const FIELD_MANAGER: &str = "elasticdl-operator";
/// The API server rejects longer notes.
const MAX_NOTE: usize = 1000;

/// Makes the key of a new job.
pub type NewKey = fn() -> Result<String, String>;

/// Performs actions through the API server.
#[derive(Clone)]
pub struct Executor {
    pub client: Client,
    pub masters_outside: bool,
    pub new_key: NewKey,
    /// The reporting instance of events.
    pub identity: String,
}

/// A written ConfigMap, which the watches will show in this version or a later one.
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

impl Executor {
    /// Performs one action. Returns what the watches must show before the next plan.
    pub async fn perform(&self, action: &JobAction) -> Result<Option<Promise>, Error> {
        let job = &action.job;
        match &action.action {
            Action::Admit { spec, grant } => self.admit(job, spec, grant).await.map(Some),
            Action::Resize(grant) => self.annotate(job, grant.patch()).await.map(Some),
            Action::Stop { pods } => {
                let promise = self.annotate(job, Grant::stop_patch()).await?;
                // It would start the master again, and the master the others.
                let master = names::master(&job.name);
                self.delete::<Job>(job, "job", &master, DeleteParams::background()).await?;
                for (name, uid) in pods {
                    // Never a later pod of the same name.
                    let only = Preconditions { uid: Some(uid.clone()), resource_version: None };
                    let params = DeleteParams::default().preconditions(only);
                    self.delete::<Pod>(job, "pod", name, params).await?;
                }
                Ok(Some(promise))
            }
            Action::UpdateStatus(status) => self.update_status(job, status).await.map(|()| None),
            Action::RecordEvent(event) => self.record(job, event).await.map(|()| None),
        }
    }

    /// The grant is written before the master is created, which reads it when it starts, and after
    /// everything else: a job with a grant lacks at most its master.
    async fn admit(&self, job: &Target, spec: &JobSpec, grant: &Grant) -> Result<Promise, Error> {
        let key = (self.new_key)().map_err(Error::Key)?;
        let objects = manifest::job_objects(spec, &key);
        let mut objects = objects.map_err(|invalid| Error::Invalid(invalid.0))?;
        objects.config_map.metadata.owner_references = Some(vec![job.owner.clone()]);
        let made = self.apply(job, "configmap", &objects.config_map).await?;
        if let Some(owner) = manifest::owner(&made) {
            objects.own(&owner);
        }
        let JobObjects { secret, service, network_policy, budgets, master, .. } = &objects;
        // An existing key stays: the job's processes use it.
        self.create::<Secret>(job, "secret", secret).await?;
        self.apply(job, "service", service).await?;
        self.apply(job, "networkpolicy", network_policy).await?;
        for budget in budgets {
            self.apply(job, "poddisruptionbudget", budget).await?;
        }
        let promise = self.annotate(job, grant.patch()).await?;
        if !self.masters_outside {
            self.create::<Job>(job, "job", master).await?;
        }
        Ok(promise)
    }

    /// Patches the annotations of the job's ConfigMap.
    async fn annotate(&self, job: &Target, patch: Value) -> Result<Promise, Error> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &job.namespace);
        let name = names::config_map(&job.name);
        // A merge, not an apply, which would also claim the job's description.
        let params =
            PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        let patch = Patch::Merge(patch);
        let call = api.patch(&name, &params, &patch);
        let map = within("annotate", what("configmap", job, &name), call).await?;
        let version = map.resource_version().unwrap_or_default();
        Ok(Promise { namespace: job.namespace.clone(), name, version })
    }

    async fn update_status(&self, job: &Target, status: &Status) -> Result<(), Error> {
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

    async fn record(&self, job: &Target, event: &JobEvent) -> Result<(), Error> {
        let now = Timestamp::now();
        let object = Event {
            metadata: ObjectMeta {
                name: Some(format!("{}.{:x}", job.name, now.as_nanosecond())),
                namespace: Some(job.namespace.clone()),
                ..ObjectMeta::default()
            },
            action: Some(event.reason.into()),
            reason: Some(event.reason.into()),
            note: Some(shortened(&event.note).to_owned()),
            type_: Some(if event.is_warning { "Warning" } else { "Normal" }.into()),
            regarding: Some(job.object.clone()),
            event_time: Some(MicroTime(now)),
            reporting_controller: Some(FIELD_MANAGER.into()),
            reporting_instance: Some(self.identity.clone()),
            ..Event::default()
        };
        self.create::<Event>(job, "event", &object).await
    }

    /// Deletes an object, unless it is gone or another one has its name.
    async fn delete<K: Object>(
        &self,
        job: &Target,
        kind: &str,
        name: &str,
        params: DeleteParams,
    ) -> Result<(), Error> {
        let api: Api<K> = Api::namespaced(self.client.clone(), &job.namespace);
        let deleted = within("delete", what(kind, job, name), api.delete(name, &params)).await;
        match deleted {
            Err(Error::Call { source, .. }) if is_code(&source, &[404, 409]) => Ok(()),
            done => done.map(drop),
        }
    }

    async fn apply<K: Object>(&self, job: &Target, kind: &str, object: &K) -> Result<K, Error> {
        let api: Api<K> = Api::namespaced(self.client.clone(), &job.namespace);
        let name = object.name_any();
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(object);
        within("apply", what(kind, job, &name), api.patch(&name, &params, &patch)).await
    }

    /// Creates an object, unless one of that name exists.
    async fn create<K: Object>(&self, job: &Target, kind: &str, object: &K) -> Result<(), Error> {
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
