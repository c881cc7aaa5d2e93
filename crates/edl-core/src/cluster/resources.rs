// SPDX-License-Identifier: Apache-2.0
//! `cpu=0.4,memory=1024Mi,gpu=1`: the resources of a pod, by the names that Kubernetes uses.

use std::collections::BTreeMap;
use std::str::FromStr;

/// Quantities by the name of the resource, as Kubernetes writes both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources(pub BTreeMap<String, String>);

/// Suffixes of an amount of bytes, and what each stands for.
pub const UNITS: [(&str, f64); 12] = [
    ("Ki", 1024.0),
    ("Mi", 1_048_576.0),
    ("Gi", 1_073_741_824.0),
    ("Ti", 1_099_511_627_776.0),
    ("Pi", 1_125_899_906_842_624.0),
    ("Ei", 1_152_921_504_606_846_976.0),
    ("K", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
    ("P", 1e15),
    ("E", 1e18),
];

impl FromStr for Resources {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut found = BTreeMap::new();
        for piece in text.split(',').map(str::trim).filter(|piece| !piece.is_empty()) {
            let Some((name, amount)) = piece.split_once('=') else {
                return Err(format!("`{piece}` is not in the form name=amount"));
            };
            let (name, amount) = (name.trim(), amount.trim());
            let (resource, amount) = match name {
                "cpu" => ("cpu", cpu(amount)?),
                "memory" => ("memory", bytes(name, amount)?),
                "disk" | "ephemeral-storage" => ("ephemeral-storage", bytes(name, amount)?),
                "gpu" => ("nvidia.com/gpu", whole(name, amount)?),
                // What a vendor's plugin offers is named with the vendor.
                vendor if vendor.contains('/') => (vendor, whole(name, amount)?),
                _ => {
                    return Err(format!(
                        "unknown resource `{name}`; use cpu, memory, disk, ephemeral-storage, gpu \
                         or VENDOR/NAME"
                    ));
                }
            };
            if found.insert(resource.to_owned(), amount).is_some() {
                return Err(format!("{resource} is specified twice"));
            }
        }
        Ok(Self(found))
    }
}

/// A multiplied amount of bytes; anything else is returned unchanged.
#[must_use]
pub fn times(amount: &str, factor: f64) -> String {
    let number = amount.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let Ok(value) = number.parse::<f64>() else { return amount.to_owned() };
    let unit = UNITS.iter().find(|(unit, _)| amount.ends_with(unit)).map_or(1.0, |(_, by)| *by);
    #[expect(clippy::cast_possible_truncation, reason = "a float to integer cast saturates")]
    #[expect(clippy::cast_sign_loss, reason = "amounts and factors are not negative")]
    let n_mebibytes = (value * unit * factor / 1_048_576.0).ceil() as u64;
    format!("{n_mebibytes}Mi")
}

/// `0.4` or `400m`.
fn cpu(amount: &str) -> Result<String, String> {
    let number = amount.strip_suffix('m').unwrap_or(amount);
    check("cpu", amount, is_number(number), "0.5 or 500m")
}

/// `1024Mi`; SI's lowercase `k` is accepted, too.
fn bytes(name: &str, amount: &str) -> Result<String, String> {
    // Kubernetes spells thousand with a small letter.
    let unit = UNITS.iter().find_map(|(unit, _)| amount.strip_suffix(unit));
    let number = unit.or_else(|| amount.strip_suffix('k')).unwrap_or(amount);
    let written = match amount.strip_suffix('K') {
        Some(number) => format!("{number}k"),
        None => amount.to_owned(),
    };
    check(name, amount, is_number(number), "4096Mi or 4Gi").map(|_| written)
}

fn whole(name: &str, amount: &str) -> Result<String, String> {
    check(name, amount, amount.parse::<u32>().is_ok(), "1")
}

fn is_number(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_digit())
        && text.parse::<f64>().is_ok_and(|number| number.is_finite() && number >= 0.0)
}

fn check(name: &str, amount: &str, fits: bool, example: &str) -> Result<String, String> {
    if fits {
        return Ok(amount.to_owned());
    }
    Err(format!("invalid amount {name}=`{amount}`; write e.g. {name}={example}"))
}
