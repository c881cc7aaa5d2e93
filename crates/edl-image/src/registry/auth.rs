// SPDX-License-Identifier: Apache-2.0
//! Authentication: the credentials that `docker login` stored, and a registry's challenges.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;

/// The key of Docker Hub in docker's configuration.
const DOCKER_KEY: &str = "https://index.docker.io/v1/";
/// The user name by which a credential helper marks a token.
const TOKEN_USER: &str = "<token>";

/// Credentials for a registry.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    None,
    Password {
        user: String,
        password: String,
    },
    /// Can be exchanged for tokens.
    Identity(String),
}

/// A registry's `WWW-Authenticate` header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Challenge {
    Basic,
    Bearer { realm: String, service: String, scope: String },
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read `{0}`, where `docker login` stores passwords")]
    Read(PathBuf, #[source] io::Error),
    #[error("invalid `{0}`, where `docker login` stores passwords")]
    Json(PathBuf, #[source] serde_json::Error),
    #[error("invalid password for `{host}` in `{file}`; run `docker login {host}` again")]
    Password { host: String, file: PathBuf },
    #[error("cannot run `{program}`, which stores the passwords for `{host}`")]
    Helper {
        program: String,
        host: String,
        #[source]
        source: io::Error,
    },
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DockerConfig {
    auths: BTreeMap<String, Auth>,
    creds_store: Option<String>,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Auth {
    auth: String,
    identitytoken: String,
}

/// The answer of a credential helper.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperAnswer {
    username: String,
    secret: String,
}

impl Credentials {
    /// Reads `$DOCKER_CONFIG/config.json`, or the one in `~/.docker`.
    pub fn of(host: &str) -> Result<Self, Error> {
        let folder = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from);
        let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".docker"));
        let Some(folder) = folder.or_else(home) else { return Ok(Self::None) };
        Self::read(&folder.join("config.json"), host)
    }

    /// Reads the credentials for a registry from a file, which need not exist.
    pub fn read(file: &Path, host: &str) -> Result<Self, Error> {
        let text = match std::fs::read(file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::None),
            Err(error) => return Err(Error::Read(file.into(), error)),
        };
        let config: DockerConfig =
            serde_json::from_slice(&text).map_err(|error| Error::Json(file.into(), error))?;
        let key = if host == "docker.io" { DOCKER_KEY } else { host };
        if let Some(helper) = config.cred_helpers.get(key).or(config.creds_store.as_ref()) {
            return ask_helper(&format!("docker-credential-{helper}"), key);
        }
        let keys = [key.to_owned(), format!("https://{key}"), format!("http://{key}")];
        let Some(auth) = keys.iter().find_map(|key| config.auths.get(key)) else {
            return Ok(Self::None);
        };
        if !auth.identitytoken.is_empty() {
            return Ok(Self::Identity(auth.identitytoken.clone()));
        }
        let refused = || Error::Password { host: host.into(), file: file.into() };
        let decoded = BASE64_STANDARD.decode(&auth.auth).map_err(|_| refused())?;
        let text = String::from_utf8(decoded).map_err(|_| refused())?;
        let (user, password) = text.trim_end_matches('\0').split_once(':').ok_or_else(refused)?;
        Ok(Self::Password { user: user.into(), password: password.into() })
    }

    /// The header that shows user and password, if there are any.
    #[must_use]
    pub fn basic(&self) -> Option<String> {
        match self {
            Self::Password { user, password } => {
                Some(format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}"))))
            }
            Self::None | Self::Identity(_) => None,
        }
    }
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Password { .. } => "Password",
            Self::Identity(_) => "Identity",
        })
    }
}

impl Challenge {
    /// Reads a header such as `Bearer realm="…",service="…",scope="…"`.
    #[must_use]
    pub fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let parameters = parameters(rest);
        let get = |name: &str| parameters.get(name).cloned();
        Some(Self::Bearer {
            realm: get("realm")?,
            service: get("service").unwrap_or_default(),
            scope: get("scope").unwrap_or_default(),
        })
    }
}

/// `a="b",c="d,e"` as a map.
fn parameters(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut rest = text;
    while let Some((name, after)) = rest.split_once('=') {
        let (value, next) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => after.split_once(',').unwrap_or((after, "")),
        };
        found.insert(name.trim_matches([',', ' ']).to_ascii_lowercase(), value.to_owned());
        rest = next;
    }
    found
}

fn ask_helper(program: &str, key: &str) -> Result<Credentials, Error> {
    let failed = |source| Error::Helper { program: program.into(), host: key.into(), source };
    let mut command = Command::new(program);
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(key.as_bytes()).map_err(failed)?;
    }
    let output = child.wait_with_output().map_err(failed)?;
    // It fails if it does not know the registry, which may allow anonymous access.
    let Ok(answer) = serde_json::from_slice::<HelperAnswer>(&output.stdout) else {
        return Ok(Credentials::None);
    };
    Ok(if answer.username == TOKEN_USER {
        Credentials::Identity(answer.secret)
    } else {
        Credentials::Password { user: answer.username, password: answer.secret }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, host: &str) -> Result<Credentials, Error> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        std::fs::write(&file, text).unwrap();
        Credentials::read(&file, host)
    }

    #[test]
    fn passwords_are_those_of_docker_login() {
        let text = r#"{"auths": {"a.example": {"auth": "YW5uOnNlY3JldDox"},
            "https://b.example": {"identitytoken": "t"}, "c.example": {"auth": "?"}}}"#;
        let ann = Credentials::Password { user: "ann".into(), password: "secret:1".into() };
        assert_eq!(read(text, "a.example").unwrap(), ann);
        assert_eq!(ann.basic().unwrap(), "Basic YW5uOnNlY3JldDox");
        assert_eq!(format!("{ann:?}"), "Password");
        assert_eq!(read(text, "b.example").unwrap(), Credentials::Identity("t".into()));
        assert_eq!(read(text, "d.example").unwrap(), Credentials::None);
        let error = read(text, "c.example").unwrap_err().to_string();
        assert!(error.contains("run `docker login c.example` again"), "{error}");
        assert!(matches!(read("{", "a.example"), Err(Error::Json(..))));
        assert_eq!(Credentials::read(Path::new("/none"), "a").unwrap(), Credentials::None);
    }

    #[test]
    fn a_challenge_has_the_address_of_tokens() {
        let header =
            r#"Bearer realm="https://t.example/token", service="r",scope="repository:a:pull,push""#;
        let expected = Challenge::Bearer {
            realm: "https://t.example/token".into(),
            service: "r".into(),
            scope: "repository:a:pull,push".into(),
        };
        assert_eq!(Challenge::parse(header), Some(expected));
        assert_eq!(Challenge::parse("Basic realm=x"), Some(Challenge::Basic));
        assert_eq!(Challenge::parse("Negotiate"), None);
    }
}
