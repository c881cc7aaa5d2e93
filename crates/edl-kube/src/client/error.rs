// SPDX-License-Identifier: Apache-2.0
//! Errors of the client: each names the object and the next step.

use kube::core::Status;

type Source = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "no cluster configured: set KUBECONFIG to its kubeconfig, or omit --image_name and --namespace to use this machine"
    )]
    NoCluster { source: Source },
    #[error("the cluster is not responding")]
    Unreachable { source: Source },
    #[error(
        "namespace `{namespace}` does not exist; create it with `kubectl create namespace {namespace}`"
    )]
    NoNamespace { namespace: String },
    #[error(
        "volume claim `{claim}` does not exist in namespace `{namespace}`; create it, or use another with --volume"
    )]
    NoClaim { claim: String, namespace: String },
    #[error(
        "PriorityClass `{class}` does not exist; create it, e.g. with `kubectl apply -f manifests/examples/high-prio.yaml`"
    )]
    NoClass { class: String },
    #[error("{message}; raise the quota of namespace `{namespace}`, or request less")]
    Quota { message: String, namespace: String },
    #[error(
        "{message}; create it with `kubectl apply -f manifests/elasticdl-rbac.yaml`, or use another \
         with --service_account"
    )]
    NoAccount { message: String },
    /// The API server's message has all details.
    #[error("{message}")]
    Forbidden { message: String },
    #[error("job name `{job}` is already in use in namespace `{namespace}`")]
    Taken { job: String, namespace: String },
    #[error("cannot {verb} {object}: {message}")]
    Refused { verb: &'static str, object: String, message: String },
    #[error("configmap `{name}` contains no job that this version of elasticdl can read")]
    NoJob { name: String, source: Source },
    #[error("secret `{secret}` contains no key")]
    NoKey { secret: String },
    #[error("cannot reach pod `{pod}`")]
    Forward { pod: String, source: Source },
}

impl Error {
    /// Whether the user's input is wrong, and nothing was started.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        !matches!(
            self,
            Self::Unreachable { .. }
                | Self::NoJob { .. }
                | Self::NoKey { .. }
                | Self::Forward { .. }
        )
    }
}

/// The meaning of a rejected call.
pub(super) fn refused(
    namespace: &str,
    verb: &'static str,
    kind: &str,
    name: &str,
    source: kube::Error,
) -> Error {
    let kube::Error::Api(status) = source else {
        return Error::Unreachable { source: source.into() };
    };
    let Status { message, code, reason, details, .. } = *status;
    let is_about = |kind: &str| details.as_ref().is_some_and(|details| details.kind == kind);
    let namespace = namespace.to_owned();
    match (code, reason.as_str()) {
        (404, _) if is_about("namespaces") => Error::NoNamespace { namespace },
        (403, _) if message.contains("exceeded quota") => Error::Quota { message, namespace },
        (403, _) if message.contains("no PriorityClass with name") => {
            let class = message.split("with name ").nth(1).and_then(|rest| rest.split(' ').next());
            Error::NoClass { class: class.unwrap_or_default().to_owned() }
        }
        (403, _) if message.contains("error looking up service account") => {
            Error::NoAccount { message }
        }
        (403 | 401, _) => Error::Forbidden { message },
        _ if name.is_empty() => Error::Refused { verb, object: kind.to_owned(), message },
        _ => Error::Refused { verb, object: format!("{kind} `{name}`"), message },
    }
}

#[cfg(test)]
mod tests {
    use kube::core::response::StatusDetails;

    use super::*;

    fn of(code: u16, message: &str, kind: &str) -> Error {
        let details = StatusDetails {
            name: String::new(),
            group: String::new(),
            kind: kind.into(),
            uid: String::new(),
            causes: Vec::new(),
            retry_after_seconds: 0,
        };
        let status = Status::failure(message, "").with_code(code).with_details(details);
        refused("n", "create", "pod", "p", kube::Error::Api(Box::new(status)))
    }

    #[test]
    fn a_refusal_becomes_one_sentence_with_the_name_of_the_object() {
        let missing = of(404, "namespaces \"n\" not found", "namespaces").to_string();
        assert!(missing.starts_with("namespace `n` does not exist"), "{missing}");
        let quota = "pods \"p\" is forbidden: exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0";
        let full = of(403, quota, "pods").to_string();
        assert!(full.contains("exceeded quota: q") && full.contains("namespace `n`"), "{full}");
        let class = "pods \"p\" is forbidden: no PriorityClass with name fast was found";
        assert!(of(403, class, "pods").to_string().starts_with("PriorityClass `fast`"));
        let account = "pods \"p\" is forbidden: error looking up service account n/a: serviceaccount \"a\" not found";
        let missing = of(403, account, "pods").to_string();
        assert!(missing.contains("\"a\" not found") && missing.contains("rbac.yaml"), "{missing}");
        let denied = "configmaps is forbidden: User \"u\" cannot create resource";
        assert_eq!(of(403, denied, "configmaps").to_string(), denied);
        let other = of(422, "spec is invalid", "pods").to_string();
        assert_eq!(other, "cannot create pod `p`: spec is invalid");
    }
}
