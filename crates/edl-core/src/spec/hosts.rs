// SPDX-License-Identifier: Apache-2.0
//! The host names that a web page is known by.

use std::str::FromStr;

/// The names of `--http_hosts`, separated by commas, in lowercase. `*` stands for all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HttpHosts(pub Vec<String>);

impl FromStr for HttpHosts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        let checked = names.map(|name| match name == "*" || name.chars().all(is_part) {
            true => Ok(name.to_ascii_lowercase()),
            false => Err(format!(
                "`{name}` is not a host name; write it without `http://` and port, e.g. \
                 train.example.com"
            )),
        });
        checked.collect::<Result<_, _>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_separated_by_commas() {
        let hosts: HttpHosts = " Train.example.com, a_b,,* ".parse().unwrap();
        assert_eq!(hosts.0, ["train.example.com", "a_b", "*"]);
        assert_eq!("".parse(), Ok(HttpHosts::default()));
        for wrong in ["http://a", "a:80", "*.example.com", "a b"] {
            let error = wrong.parse::<HttpHosts>().unwrap_err();
            assert!(error.contains("is not a host name"), "{error}");
        }
    }
}
