// SPDX-License-Identifier: Apache-2.0
//! Plain comma-separated text with a header, as the artifact writes it: no quotes.

use super::{Error, Files};

pub(super) struct Record<'a> {
    file: &'a str,
    line: usize,
    fields: Vec<&'a str>,
}

/// The lines of a file with the named columns, in the order of `columns`.
pub(super) fn rows<'a>(
    files: &'a Files,
    path: &'a str,
    columns: &[&str],
) -> Result<Vec<Record<'a>>, Error> {
    let text = files.get(path).ok_or_else(|| Error::Missing(path.to_owned()))?;
    let malformed = |line: usize, text: &str| Error::Malformed {
        file: path.to_owned(),
        line,
        text: text.to_owned(),
    };
    let mut lines = text.lines().enumerate();
    let (_, header) = lines.next().ok_or_else(|| malformed(1, ""))?;
    let header: Vec<&str> = header.split(',').map(str::trim).collect();
    let at = |column: &&str| {
        header.iter().position(|name| name == column).ok_or_else(|| malformed(1, column))
    };
    let places: Vec<usize> = columns.iter().map(at).collect::<Result<_, _>>()?;
    let mut records = Vec::new();
    for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let pick = |place: &usize| fields.get(*place).copied();
        let picked: Option<Vec<&str>> = places.iter().map(pick).collect();
        let fields = picked.ok_or_else(|| malformed(index + 1, line))?;
        records.push(Record { file: path, line: index + 1, fields });
    }
    Ok(records)
}

impl Record<'_> {
    pub(super) fn text(&self, at: usize) -> &str {
        self.fields[at]
    }

    pub(super) fn number(&self, at: usize) -> Result<f64, Error> {
        self.fields[at].parse().map_err(|_| self.malformed(at))
    }

    pub(super) fn integer(&self, at: usize) -> Result<u32, Error> {
        self.fields[at].parse().map_err(|_| self.malformed(at))
    }

    fn malformed(&self, at: usize) -> Error {
        Error::Malformed {
            file: self.file.to_owned(),
            line: self.line,
            text: self.fields[at].to_owned(),
        }
    }
}
