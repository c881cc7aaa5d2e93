// SPDX-License-Identifier: Apache-2.0
//! Names of images: `[HOST[:PORT]/]NAME[:TAG][@DIGEST]`.

use std::fmt;

use crate::digest::Digest;

/// The registry of names without a host, and its prefix of names without a slash.
const DEFAULT_HOST: &str = "docker.io";
const DEFAULT_FOLDER: &str = "library/";
const DEFAULT_ADDRESS: &str = "registry-1.docker.io";
const DEFAULT_TAG: &str = "latest";
/// The longest tag and name that registries accept.
const MAX_TAG: usize = 128;
const MAX_NAME: usize = 255;

/// The full name of an image.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reference {
    /// Host and port of the registry.
    pub host: String,
    /// The repository there, such as `library/python`.
    pub name: String,
    pub tag: String,
    /// Takes precedence over the tag.
    pub digest: Option<Digest>,
}

/// Why a text is not a valid image name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid image name `{text}`: {why}; use NAME:TAG or HOST:PORT/NAME:TAG")]
pub struct Error {
    text: String,
    why: &'static str,
}

impl Reference {
    pub fn parse(text: &str) -> Result<Self, Error> {
        let error = |why| Error { text: text.into(), why };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => {
                let digest = Digest::parse(digest);
                (rest, Some(digest.map_err(|_| error("`@` needs a SHA-256 digest after it"))?))
            }
            None => (text, None),
        };
        let (host, path) = match rest.split_once('/') {
            Some((first, path)) if is_host(first) => (first, path),
            Some(_) | None => (DEFAULT_HOST, rest),
        };
        let (name, tag) = path.split_once(':').unwrap_or((path, DEFAULT_TAG));
        if !is_valid_host(host) {
            return Err(error("invalid host"));
        }
        if name.chars().any(|c| c.is_ascii_uppercase()) {
            return Err(error("image names must be lower case"));
        }
        if name.len() > MAX_NAME || !name.split('/').all(is_part) {
            return Err(error("a name has parts of a-z, 0-9, `.`, `_`, `-`, separated by `/`"));
        }
        if !is_tag(tag) {
            return Err(error("a tag has up to 128 characters of a-z, A-Z, 0-9, `.`, `_`, `-`"));
        }
        let folder = if host == DEFAULT_HOST && !name.contains('/') { DEFAULT_FOLDER } else { "" };
        Ok(Self { host: host.into(), name: format!("{folder}{name}"), tag: tag.into(), digest })
    }

    /// The registry's address: scheme, host and port. Only a registry on this machine is used
    /// without TLS.
    #[must_use]
    pub fn address(&self) -> String {
        let host = if self.host == DEFAULT_HOST { DEFAULT_ADDRESS } else { &self.host };
        let scheme = if self.is_loopback() { "http" } else { "https" };
        format!("{scheme}://{host}")
    }

    /// Whether the registry is on this machine.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        is_loopback(&self.host)
    }

    /// The version to request: the digest if there is one, or else the tag.
    #[must_use]
    pub fn version(&self) -> &str {
        self.digest.as_ref().map_or(&self.tag, Digest::as_str)
    }

    /// The same image by name and tag alone, as tools write it into archives.
    #[must_use]
    pub fn tagged(&self) -> String {
        format!("{}/{}:{}", self.host, self.name, self.tag)
    }

    /// The shortest name that means the same, as users write it.
    #[must_use]
    pub fn short(&self) -> String {
        let full = self.tagged();
        let bare = full.strip_prefix("docker.io/").unwrap_or(&full);
        bare.strip_prefix(DEFAULT_FOLDER).unwrap_or(bare).into()
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.short())?;
        self.digest.as_ref().map_or(Ok(()), |digest| write!(f, "@{digest}"))
    }
}

/// Whether the part before the first slash names a registry.
fn is_host(part: &str) -> bool {
    part == "localhost" || part.contains(['.', ':'])
}

fn is_valid_host(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        Some(_) | None => (host, None),
    };
    let v6 = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    let is_good = match v6 {
        Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !name.is_empty() && name.chars().all(is_name),
    };
    is_good && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

fn is_part(part: &str) -> bool {
    let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    part.starts_with(is_inner)
        && part.ends_with(is_inner)
        && part.chars().all(|c| is_inner(c) || matches!(c, '.' | '_' | '-'))
}

fn is_tag(tag: &str) -> bool {
    let is_first = |c: char| c.is_ascii_alphanumeric() || c == '_';
    tag.starts_with(is_first)
        && tag.len() <= MAX_TAG
        && tag.chars().all(|c| is_first(c) || matches!(c, '.' | '-'))
}

/// Whether a host, with or without a port, is this machine.
pub(crate) fn is_loopback(host: &str) -> bool {
    let bare = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    bare == "localhost"
        || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(text: &str) -> (String, String) {
        let reference = Reference::parse(text).unwrap();
        (reference.address(), reference.tagged())
    }

    #[test]
    fn short_names_mean_what_tools_take_them_for() {
        assert_eq!(full("python").1, "docker.io/library/python:latest");
        assert_eq!(full("elasticdl:mnist_ps").1, "docker.io/library/elasticdl:mnist_ps");
        assert_eq!(full("me/model:1").1, "docker.io/me/model:1");
        assert_eq!(full("host.example/a/b").1, "host.example/a/b:latest");
        assert_eq!(full("localhost:5000/a:b").1, "localhost:5000/a:b");
        assert_eq!(Reference::parse("elasticdl:ci").unwrap().to_string(), "elasticdl:ci");
    }

    #[test]
    fn only_this_machine_is_asked_without_tls() {
        for loopback in ["localhost:5000/a", "127.0.0.1:5000/a", "127.9.9.9/a", "[::1]:5000/a"] {
            assert!(full(loopback).0.starts_with("http://"), "{loopback}");
        }
        for far in ["a", "10.0.0.1:5000/a", "localhost.example/a", "127.0.0.1.example/a"] {
            assert!(full(far).0.starts_with("https://"), "{far}");
        }
    }

    #[test]
    fn a_digest_wins_over_the_tag() {
        let digest = Digest::of(b"");
        let reference = Reference::parse(&format!("a:b@{digest}")).unwrap();
        assert_eq!(reference.version(), digest.to_string());
        assert_eq!(reference.to_string(), format!("a:b@{digest}"));
    }

    #[test]
    fn what_is_no_name_is_refused_with_its_reason() {
        let wrong = [
            "",
            ":",
            "a:",
            "a:b:c",
            "A",
            "a//b",
            "/a",
            "a/",
            "a b",
            "a@b",
            "..",
            "a/../b",
            "h.x:p/a",
            "http://host/a",
            "-a",
            "a:.b",
            "[::2/a",
        ];
        for text in wrong {
            let error = Reference::parse(text).expect_err(text).to_string();
            assert!(error.starts_with(&format!("invalid image name `{text}`: ")), "{error}");
        }
        let why = |text| Reference::parse(text).expect_err(text).why;
        assert_eq!(why("a@b"), "`@` needs a SHA-256 digest after it");
        assert_eq!(why("a//b"), "a name has parts of a-z, 0-9, `.`, `_`, `-`, separated by `/`");
        assert_eq!(why("a:.b"), "a tag has up to 128 characters of a-z, A-Z, 0-9, `.`, `_`, `-`");
    }
}
