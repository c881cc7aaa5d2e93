// SPDX-License-Identifier: Apache-2.0
//! The flags of `data`: data sets.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use edl_core::spec::{Codec, FieldType as _};

/// Names with values.
type Pairs = BTreeMap<String, String>;

#[derive(Args, Debug)]
pub(crate) struct DataArgs {
    #[command(subcommand)]
    pub(crate) command: DataCommand,
}

#[derive(Debug, Subcommand)]
#[command(rename_all = "snake_case")]
pub(crate) enum DataCommand {
    /// Write a standard dataset as RecordIO to `DIR/NAME/train` and `DIR/NAME/test`
    Gen {
        /// Dataset: mnist, fashion_mnist or census
        name: String,
        /// Output folder
        dir: PathBuf,
        /// Folder with the original files [default: the folder where the dataset's package
        /// installs them]
        #[arg(long, value_name = "DIR")]
        source: Option<PathBuf>,
        #[command(flatten)]
        write: WriteFlags,
    },
    /// Convert a dataset to RecordIO
    Import {
        /// Input: a file, folder, glob or URL; for MNIST's format, the image file
        from: String,
        /// Output folder
        dir: PathBuf,
        /// Label file, for MNIST's format
        #[arg(long, value_name = "FILE")]
        labels: Option<PathBuf>,
        #[command(flatten)]
        write: WriteFlags,
        #[command(flatten)]
        read: ReadFlags,
    },
    /// Show a summary of a dataset
    Inspect {
        /// File, folder, glob or URL
        data: String,
        #[command(flatten)]
        read: ReadFlags,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the first records, one JSON object per line
    Head {
        /// File, folder, glob or URL
        data: String,
        /// Number of records
        #[arg(long, short = 'n', value_name = "N", default_value_t = 3)]
        records: u64,
        #[command(flatten)]
        read: ReadFlags,
    },
}

#[derive(Args, Clone, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct ReadFlags {
    /// Record encoding: tf_example or bytes
    #[arg(long, value_name = "CODEC", default_value = "tf_example", value_parser = Codec::parse)]
    pub(crate) codec_type: Codec,
    /// Options for the data reader, e.g. "delimiter=;"
    #[arg(long, value_name = "K=V;…", value_parser = Pairs::parse)]
    pub(crate) data_reader_params: Option<Pairs>,
}

#[derive(Args, Clone, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct WriteFlags {
    /// Compression: none, snappy or gzip
    #[arg(long, value_name = "NAME", default_value = "gzip")]
    pub(crate) compression: String,
    /// Number of output files
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) files: u64,
    /// Write only the first N records; with `gen`, the first N training records [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<u64>,
    /// With `gen`, write only the first N test records [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) test_limit: Option<u64>,
}
