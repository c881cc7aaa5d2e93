// SPDX-License-Identifier: Apache-2.0
//! ELF files: the loader and libraries that a program needs, and where its debug data starts.

use object::Endianness;
use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _};

/// Header fields with the position, size and name index of the section table.
const SECTION_FIELDS: [std::ops::Range<usize>; 2] = [0x28..0x30, 0x3c..0x40];

/// What a program needs from the machine that it runs on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Path of the dynamic loader; none: the program is static, or a library.
    pub interpreter: Option<String>,
    pub libraries: Vec<String>,
    /// Folders where its libraries are looked for first.
    pub run_path: Vec<String>,
}

/// The file is no ELF program for a 64-bit machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a valid 64-bit ELF program: {0}")]
pub struct Error(String);

impl From<object::Error> for Error {
    fn from(error: object::Error) -> Self {
        Self(error.to_string())
    }
}

/// Reads what the file needs from its program headers.
pub fn needs(file: &[u8]) -> Result<Needs, Error> {
    let header = FileHeader64::<Endianness>::parse(file)?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, file)?;
    let mut needs = Needs::default();
    let mut entries = Vec::new();
    for segment in segments {
        if let Some(path) = segment.interpreter(endian, file)? {
            needs.interpreter = Some(text(path)?);
        }
        if let Some(dynamic) = segment.dynamic(endian, file)? {
            let both = |each: &elf::Dyn64<Endianness>| (each.d_tag(endian), each.d_val(endian));
            entries.extend(dynamic.iter().map(both).take_while(|(tag, _)| *tag != elf::DT_NULL));
        }
    }
    let value = |wanted| entries.iter().find(|(tag, _)| *tag == wanted).map(|(_, value)| *value);
    let (Some(address), Some(size)) = (value(elf::DT_STRTAB), value(elf::DT_STRSZ)) else {
        return Ok(needs);
    };
    let names = segments
        .iter()
        .filter(|segment| segment.p_type(endian) == elf::PT_LOAD)
        .find_map(|segment| segment.data_range(endian, file, address, size).ok().flatten())
        .ok_or_else(|| Error("its string table is missing".into()))?;
    for (tag, at) in &entries {
        let name = || {
            let rest = usize::try_from(*at).ok().and_then(|at| names.get(at..));
            text(rest.and_then(|rest| rest.split(|byte| *byte == 0).next()).unwrap_or_default())
        };
        match *tag {
            elf::DT_NEEDED => needs.libraries.push(name()?),
            elf::DT_RPATH | elf::DT_RUNPATH => {
                needs.run_path.extend(name()?.split(':').map(str::to_owned));
            }
            _ => {}
        }
    }
    Ok(needs)
}

/// The file without symbols and debug data: everything after the last loaded byte is removed, and
/// with it the section table, which only linkers and debuggers read.
pub fn strip(mut file: Vec<u8>) -> Result<Vec<u8>, Error> {
    let header = FileHeader64::<Endianness>::parse(file.as_slice())?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, file.as_slice())?;
    let ends = segments
        .iter()
        .map(|segment| segment.p_offset(endian).saturating_add(segment.p_filesz(endian)));
    let end = ends.max().and_then(|end| usize::try_from(end).ok());
    let end = end.filter(|end| (0x40..=file.len()).contains(end));
    file.truncate(end.ok_or_else(|| Error("its segments are missing".into()))?);
    for field in SECTION_FIELDS {
        file[field].fill(0);
    }
    Ok(file)
}

fn text(bytes: &[u8]) -> Result<String, Error> {
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    String::from_utf8(bytes.to_vec()).map_err(|_| Error("a name in it is not valid UTF-8".into()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;

    fn this_test() -> Vec<u8> {
        std::fs::read(std::env::current_exe().unwrap()).unwrap()
    }

    #[test]
    fn a_program_names_its_loader_and_libraries() {
        let needs = needs(&this_test()).unwrap();
        assert!(needs.interpreter.unwrap().starts_with("/lib"));
        assert!(needs.libraries.iter().any(|name| name.starts_with("libc.so")));
    }

    #[test]
    fn a_stripped_program_is_smaller_and_still_runs() {
        let whole = this_test();
        let stripped = strip(whole.clone()).unwrap();
        assert!(stripped.len() < whole.len());
        assert_eq!(needs(&stripped), needs(&whole));
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        std::fs::write(&program, stripped).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let listed = Command::new(&program).arg("--list").output().unwrap();
        assert!(String::from_utf8_lossy(&listed.stdout).contains("still_runs"), "{listed:?}");
    }

    #[test]
    fn what_is_no_program_is_refused() {
        for bytes in [&b""[..], b"#!/bin/sh\n", b"\x7fELF", &[0; 4096]] {
            assert!(needs(bytes).is_err() && strip(bytes.to_vec()).is_err());
        }
    }
}
