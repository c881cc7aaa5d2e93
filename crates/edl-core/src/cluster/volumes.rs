// SPDX-License-Identifier: Apache-2.0
//! `claim_name=c,mount_path=/data;host_path=/d,mount_path=/e`: storage of a job's pods.

use std::collections::BTreeMap;
use std::str::FromStr;

/// The volumes of every pod of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Volumes(pub Vec<Volume>);

/// One place in a pod, and what is found there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    pub source: Source,
    pub mount_path: String,
    pub sub_path: Option<String>,
}

/// What is mounted. The same one under several paths is one volume of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Claim(String),
    HostPath { path: String, kind: Option<String> },
}

const KEYS: [&str; 6] =
    ["claim_name", "host_path", "mount_path", "sub_path", "type", "volume_name"];

impl FromStr for Volumes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split(';').map(str::trim).filter(|part| !part.is_empty());
        let volumes: Vec<Volume> = parts.map(volume).collect::<Result<_, _>>()?;
        for (at, volume) in volumes.iter().enumerate() {
            if volumes[..at].iter().any(|other| other.mount_path == volume.mount_path) {
                return Err(format!("`{}` is mounted twice", volume.mount_path));
            }
        }
        Ok(Self(volumes))
    }
}

fn volume(part: &str) -> Result<Volume, String> {
    let mut fields: BTreeMap<&str, &str> = BTreeMap::new();
    for piece in part.split(',').map(str::trim).filter(|piece| !piece.is_empty()) {
        let word = piece.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
        match word {
            Some((key, value)) if KEYS.contains(&key) && !value.is_empty() => {
                fields.insert(key, value);
            }
            Some(_) | None => {
                return Err(format!(
                    "cannot parse `{piece}`; write claim_name=CLAIM,mount_path=PATH or \
                     host_path=PATH,mount_path=PATH"
                ));
            }
        }
    }
    let field = |key: &str| fields.get(key).map(|value| (*value).to_owned());
    let mount_path =
        field("mount_path").ok_or_else(|| format!("`{part}` has no mount_path=PATH"))?;
    if !mount_path.starts_with('/') || mount_path.contains(':') {
        return Err(format!("mount_path=`{mount_path}` must be an absolute path without `:`"));
    }
    // `volume_name` is the deprecated name of `claim_name`.
    let claim = field("claim_name")
        .or_else(|| field("volume_name").filter(|_| !fields.contains_key("host_path")));
    let source = match (claim, field("host_path")) {
        (Some(claim), None) => {
            super::check_name("a volume claim", &claim)?;
            Source::Claim(claim)
        }
        (None, Some(path)) => Source::HostPath { path, kind: field("type") },
        (Some(_), Some(_)) => {
            return Err(format!(
                "`{part}` has both a claim and a host path; separate two volumes with `;`"
            ));
        }
        (None, None) => {
            return Err(format!("`{part}` has neither claim_name=CLAIM nor host_path=PATH"));
        }
    };
    Ok(Volume { source, mount_path, sub_path: field("sub_path") })
}
