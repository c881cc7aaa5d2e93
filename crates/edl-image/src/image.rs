// SPDX-License-Identifier: Apache-2.0
//! The parts of an image, as the OCI image specification defines them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::digest::Digest;

pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// Docker's older names for the same types.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

/// Replaces every time: an image depends on its contents, not on when it was built.
pub const EPOCH: &str = "1970-01-01T00:00:00Z";

/// Points to a blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    #[serde(default)]
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    pub architecture: String,
    pub os: String,
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// One image: its configuration and its layers, lowest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub schema_version: u32,
    pub media_type: Option<String>,
    pub config: Descriptor,
    pub layers: Vec<Descriptor>,
}

/// Several images, usually one per platform.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    pub schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    pub manifests: Vec<Descriptor>,
}

/// How a container of the image is started, and its layers. Unknown fields are kept as they are in
/// the base image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    pub architecture: String,
    pub os: String,
    #[serde(default)]
    pub config: Runtime,
    pub rootfs: RootFs,
    #[serde(default)]
    pub history: Vec<Value>,
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Runtime {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub working_dir: String,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub exposed_ports: BTreeMap<String, Value>,
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootFs {
    #[serde(rename = "type")]
    pub kind: String,
    /// Digests of the layers before compression.
    pub diff_ids: Vec<Digest>,
}

impl Descriptor {
    #[must_use]
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        let media_type = media_type.into();
        Self { media_type, digest, size, platform: None, annotations: BTreeMap::new() }
    }

    /// Whether it points to several images.
    #[must_use]
    pub fn is_index(&self) -> bool {
        [INDEX, DOCKER_INDEX].contains(&self.media_type.as_str())
    }
}

impl Config {
    /// An image without layers for this machine's architecture.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            architecture: architecture().into(),
            os: "linux".into(),
            config: Runtime::default(),
            rootfs: RootFs { kind: "layers".into(), diff_ids: Vec::new() },
            history: Vec::new(),
            other: Map::new(),
        }
    }
}

impl Index {
    /// The image for this machine's architecture; one without a platform fits all.
    #[must_use]
    pub fn for_this_machine(&self) -> Option<&Descriptor> {
        let fits =
            |platform: &Platform| platform.os == "linux" && platform.architecture == architecture();
        let exact = |each: &&Descriptor| each.platform.as_ref().is_some_and(fits);
        let any = |each: &&Descriptor| each.platform.is_none();
        self.manifests.iter().find(exact).or_else(|| self.manifests.iter().find(any))
    }
}

/// This machine's processor architecture, as images name it.
#[must_use]
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Tools write `null` for an empty list.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_fields_of_a_base_image_are_kept() {
        let text = format!(
            r#"{{"architecture":"amd64","os":"linux","variant":"v3","config":{{"Env":["A=1"],
            "Cmd":null,"StopSignal":"SIGINT"}},"rootfs":{{"type":"layers","diff_ids":["{}"]}}}}"#,
            Digest::of(b"layer")
        );
        let config: Config = serde_json::from_str(&text).unwrap();
        assert_eq!(config.config.env, ["A=1"]);
        let written = serde_json::to_value(&config).unwrap();
        assert_eq!(written["variant"], "v3");
        assert_eq!(written["config"]["StopSignal"], "SIGINT");
        assert_eq!(written["config"].get("Cmd"), None);
    }

    #[test]
    fn the_image_of_this_kind_of_processor_is_taken() {
        let entry = |name: &str, architecture: Option<&str>| Descriptor {
            platform: architecture.map(|architecture| Platform {
                architecture: architecture.into(),
                os: "linux".into(),
                other: Map::new(),
            }),
            ..Descriptor::new(MANIFEST, Digest::of(name.as_bytes()), 1)
        };
        let other = entry("other", Some("m68k"));
        let mine = entry("mine", Some(architecture()));
        let index = |manifests| Index { schema_version: 2, media_type: None, manifests };
        let both = index(vec![other.clone(), mine.clone()]);
        assert_eq!(both.for_this_machine(), Some(&mine));
        assert_eq!(index(vec![other]).for_this_machine(), None);
    }
}
