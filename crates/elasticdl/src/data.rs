// SPDX-License-Identifier: Apache-2.0
//! `data`: generates, converts and inspects data sets.

use std::io::Write;

use edl_data::generate::{self, GenerateOptions, Set};
use edl_data::import::{self, ImportOptions, Written};
use edl_data::inspect::{self, Summary};
use edl_data::recordio::{Compressor, WriterOptions};
use edl_data::{Error, OpenOptions};

use crate::cli::data::{DataArgs, DataCommand, ReadFlags, WriteFlags};
use crate::console::{counted, grouped, write_json};
use crate::exit::{Exit, refuse};

/// Runs the command.
pub(crate) fn run(args: DataArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    match args.command {
        DataCommand::Gen { name, dir, source, write } => {
            let set: Set = name.parse().map_err(refused)?;
            let mut test = write_options(&write)?;
            test.limit = write.test_limit;
            let options = GenerateOptions { source, train: write_options(&write)?, test };
            for written in generate::generate(set, &dir, &options).map_err(refused)? {
                print_written(&written, out)?;
            }
        }
        DataCommand::Import { from, dir, labels, write, read } => {
            let options = write_options(&write)?;
            let written = match labels {
                Some(labels) => import::idx(from.as_ref(), &labels, &dir, &options),
                None => import::table(&from, &read_options(read), &dir, &options),
            };
            print_written(&written.map_err(refused)?, out)?;
        }
        DataCommand::Inspect { data, read, json } => {
            let summary = inspect::inspect(&data, &read_options(read)).map_err(refused)?;
            if json {
                write_json(&summary, out)?;
            } else {
                print_summary(&summary, out)?;
            }
        }
        DataCommand::Head { data, records, read } => {
            for record in inspect::head(&data, records, &read_options(read)).map_err(refused)? {
                writeln!(out, "{record}")?;
            }
        }
    }
    Ok(Exit::Ok)
}

fn refused(error: Error) -> anyhow::Error {
    refuse(error.to_string())
}

fn read_options(read: ReadFlags) -> OpenOptions {
    let ReadFlags { codec_type: codec, data_reader_params } = read;
    OpenOptions { codec, params: data_reader_params.unwrap_or_default() }
}

fn write_options(write: &WriteFlags) -> anyhow::Result<ImportOptions> {
    let all = Compressor::ALL;
    let compressor = all.into_iter().find(|compressor| compressor.name() == write.compression);
    let compressor = compressor.ok_or_else(|| {
        let known = all.map(Compressor::name).join(", ");
        refuse(format!("unknown --compression `{}`; choose from {known}", write.compression))
    })?;
    if write.files == 0 {
        return Err(refuse("--files must be at least 1"));
    }
    let writer = WriterOptions { compressor, ..WriterOptions::default() };
    Ok(ImportOptions { writer, files: write.files, limit: write.limit })
}

fn print_written(written: &Written, out: &mut dyn Write) -> std::io::Result<()> {
    let Written { folder, files, records, bytes } = written;
    writeln!(
        out,
        "{folder}: {} in {}, {} bytes",
        counted(*records, "record"),
        counted(*files, "file"),
        grouped(*bytes)
    )
}

fn print_summary(summary: &Summary, out: &mut dyn Write) -> anyhow::Result<()> {
    let packed = summary.compressor.map_or(String::new(), |name| format!(" ({name})"));
    writeln!(out, "data         {}", summary.location)?;
    writeln!(out, "format       {}{packed}", summary.format.name())?;
    writeln!(out, "records      {}", grouped(summary.records))?;
    writeln!(out, "bytes        {}", grouped(summary.bytes))?;
    writeln!(out, "fingerprint  {}", summary.fingerprint)?;
    writeln!(out, "\n{:<24}{:>12}{:>14}{:>8}", "FILE", "RECORDS", "BYTES", "CHUNKS")?;
    for file in &summary.files {
        let (records, bytes) = (grouped(file.records), grouped(file.bytes));
        writeln!(out, "{:<24}{records:>12}{bytes:>14}{:>8}", file.name, file.chunks)?;
    }
    writeln!(out, "\n{:<24}{:<10}{:<16}PRESENT", "FIELD", "TYPE", "LENGTH")?;
    for field in &summary.fields {
        let kind = serde_json::to_value(field.kind)?;
        let kind = kind.as_str().unwrap_or("?");
        let length = if field.min_len == field.max_len {
            field.min_len.to_string()
        } else {
            format!("{}..{}", field.min_len, field.max_len)
        };
        writeln!(out, "{:<24}{kind:<10}{length:<16}{}", field.name, grouped(field.present))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    fn data(args: &[&str]) -> Result<String, String> {
        let line = [&["elasticdl", "data"], args].concat();
        let Command::Data(args) = Cli::try_parse_from(line).unwrap().command else { panic!() };
        let mut out = Vec::new();
        let result = run(args, &mut out);
        result.map(|_| String::from_utf8(out).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_table_is_imported_inspected_and_shown() {
        let root = tempfile::tempdir().unwrap();
        let csv = root.path().join("people.csv");
        std::fs::write(&csv, "age,name\n31,Ann\n42,Bob\n").unwrap();
        let records = root.path().join("records");
        let (csv, records) = (csv.to_str().unwrap(), records.to_str().unwrap());
        let printed = data(&["import", csv, records, "--files=1", "--compression=none"]).unwrap();
        assert!(printed.contains("2 records in 1 file,"), "{printed}");
        let shown = data(&["inspect", records]).unwrap();
        assert!(shown.contains("records      2") && shown.contains("age"), "{shown}");
        let json: serde_json::Value =
            serde_json::from_str(&data(&["inspect", records, "--json"]).unwrap()).unwrap();
        assert_eq!(json["records"], 2);
        let head = data(&["head", records, "-n", "1"]).unwrap();
        assert_eq!(head.lines().count(), 1);
        assert!(head.contains("31") && head.contains("Ann"), "{head}");
        assert!(data(&["import", csv, records]).is_err(), "data is not overwritten");
    }

    #[test]
    fn bad_values_are_refused_with_the_known_ones() {
        assert!(data(&["gen", "imagenet", "x"]).unwrap_err().contains("fashion_mnist"));
        assert!(data(&["import", "a", "b", "--compression=zip"]).unwrap_err().contains("gzip"));
        assert!(data(&["head", "/no/such/data"]).unwrap_err().contains("`/no/such/data`"));
    }
}
