// SPDX-License-Identifier: Apache-2.0
//! `completions`: shell completions for every command and flag.

use std::io::Write;

use crate::exit::Exit;
use crate::help::{self, Detail};

/// Writes the completions of one shell.
pub(crate) fn run(shell: clap_complete::Shell, out: &mut dyn Write) -> anyhow::Result<Exit> {
    // The generator panics when its output is closed, so it writes into memory.
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut help::command(Detail::Everything), "elasticdl", &mut text);
    out.write_all(&text)?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_know_the_flags() {
        let mut out = Vec::new();
        run(clap_complete::Shell::Bash, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("--num_workers") && text.contains("audit"));
    }
}
