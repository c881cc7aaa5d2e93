// SPDX-License-Identifier: Apache-2.0
//! Initial values that a model provides: one file in the job's folder, written once.
//!
//! Every worker offers the values of its model. The first complete file is kept and never
//! overwritten, so all servers and replicas start from the same numbers, even if two processes would
//! draw different ones.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use crate::checkpoint::{self, at, write_once};
use crate::model::Model;

/// Name of the file in the job's folder.
pub const FILE: &str = edl_core::job_dir::FIRST_VALUES;
/// The only tensor in it: the flat vector of all dense parameters.
const TENSOR: &str = "dense";

/// Why a model's first values cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    File(#[from] checkpoint::Error),
    #[error("model `{model}` must provide initial values for its parameters, but provides none")]
    NoneBrought { model: String },
    #[error(
        "model `{model}` provides {has} initial values for {needs} parameters; provide one per \
         parameter"
    )]
    Brought { model: String, has: usize, needs: usize },
    #[error("`{}` is not a file of initial values: {problem}", path.display())]
    Unreadable { path: PathBuf, problem: String },
    #[error(
        "`{}` has {has} initial values, but the model has {needs} parameters; if the model has \
         changed, start a new job",
        path.display()
    )]
    Length { path: PathBuf, has: usize, needs: usize },
}

/// Brings the first values of `model` to its job, unless it needs none or they are there.
pub fn offer(job_dir: &Path, model: &dyn Model) -> Result<(), Error> {
    let spec = model.spec();
    if !spec.brings_first_values() || job_dir.join(FILE).exists() {
        return Ok(());
    }
    let name = || spec.name.clone();
    let values = model.first_values().ok_or_else(|| Error::NoneBrought { model: name() })?;
    let (has, needs) = (values.len(), spec.dense_len());
    if has != needs {
        return Err(Error::Brought { model: name(), has, needs });
    }
    write(job_dir, &values)?;
    Ok(())
}

/// Writes the file; `false` if it already exists.
pub fn write(job_dir: &Path, values: &[f32]) -> Result<bool, Error> {
    let path = job_dir.join(FILE);
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let file = TensorView::new(Dtype::F32, vec![values.len()], &bytes)
        .and_then(|tensor| serialize([(TENSOR, tensor)], None));
    let file =
        file.map_err(|error| Error::Unreadable { path: path.clone(), problem: error.to_string() })?;
    Ok(write_once(job_dir, FILE, &file)?)
}

/// Reads the file of a model with `dense_len` parameters.
pub fn read(job_dir: &Path, dense_len: usize) -> Result<Vec<f32>, Error> {
    let path = job_dir.join(FILE);
    let bytes = fs::read(&path).map_err(at("read", &path))?;
    let unreadable = |problem: String| Error::Unreadable { path: path.clone(), problem };
    let tensors =
        SafeTensors::deserialize(&bytes).map_err(|error| unreadable(error.to_string()))?;
    let tensor = tensors.tensor(TENSOR).map_err(|error| unreadable(error.to_string()))?;
    if tensor.dtype() != Dtype::F32 {
        return Err(unreadable(format!("`{TENSOR}` is not single precision")));
    }
    let (words, _) = tensor.data().as_chunks();
    if words.len() != dense_len {
        return Err(Error::Length { path, has: words.len(), needs: dense_len });
    }
    Ok(words.iter().map(|word| f32::from_le_bytes(*word)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_writers_the_first_wins_and_nothing_is_left_over() {
        let dir = tempfile::tempdir().unwrap();
        let offer = |number: f32| write(dir.path(), &vec![number; 100_000]).unwrap();
        let won: Vec<bool> = std::thread::scope(|scope| {
            let writers: Vec<_> =
                (0..8_u8).map(|n| scope.spawn(move || offer(f32::from(n)))).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        let winner = won.iter().position(|won| *won).unwrap();
        assert_eq!(won.iter().filter(|won| **won).count(), 1);
        let values = read(dir.path(), 100_000).unwrap();
        assert!(values == vec![winner as f32; 100_000]);
        assert!(!offer(9.0));
        assert_eq!(read(dir.path(), 100_000).unwrap(), values);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_missing_or_unfit_file_is_an_error_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |len: usize| read(dir.path(), len).unwrap_err().to_string();
        assert!(refused(3).contains("cannot read `") && refused(3).contains(FILE));
        write(dir.path(), &[1.0, f32::NAN]).unwrap();
        assert!(read(dir.path(), 2).unwrap()[1].is_nan());
        assert!(refused(3).contains("has 2 initial values, but the model has 3 parameters"));
        let path = dir.path().join(FILE);
        let file = fs::read(&path).unwrap();
        for len in 0..file.len() {
            fs::write(&path, &file[..len]).unwrap();
            assert!(refused(2).contains("is not a file of initial values"), "{len} bytes");
        }
    }
}
