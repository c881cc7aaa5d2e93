// SPDX-License-Identifier: Apache-2.0
//! Tests of job folders.

use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::exit::{Exit, of_error};

fn spec(name: &str) -> JobSpec {
    JobSpec { job_name: name.into(), ..JobSpec::default() }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_new_job_is_private_and_complete() {
    let root = tempfile::tempdir().unwrap();
    let home = Home::at(&root.path().join("home"));
    let job = home.create(&spec("one"), None).unwrap();
    assert_eq!(mode(job.dir()), 0o700);
    assert_eq!(mode(&job.paths().key()), 0o600);
    assert_eq!(mode(&job.paths().spec()), 0o600);
    assert_eq!(job.spec().unwrap(), spec("one"));
    assert!(job.key().is_ok());
    assert_eq!(job.state(), JobState::Interrupted);
    let hidden = fs::read_dir(home.jobs_dir()).unwrap().count();
    assert_eq!(hidden, 1, "no draft is left behind");
}

#[test]
fn a_taken_name_is_refused_with_the_three_ways_out() {
    let root = tempfile::tempdir().unwrap();
    let home = Home::at(root.path());
    home.create(&spec("one"), None).unwrap();
    let error = home.create(&spec("one"), None).unwrap_err();
    assert_eq!(of_error(&error), Exit::BadInput);
    for word in ["`one`", "--resume one", "--job_name", "elasticdl clean one"] {
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn a_job_elsewhere_is_found_by_name_and_removed_with_its_link() {
    let root = tempfile::tempdir().unwrap();
    let home = Home::at(&root.path().join("home"));
    let place = root.path().join("elsewhere");
    let job = home.create(&spec("far"), Some(&place)).unwrap();
    assert_eq!(home.find(Some("far")).unwrap(), job);
    assert_eq!(home.find(place.to_str()).unwrap(), job);
    assert!(home.create(&spec("near"), Some(&place)).is_err());
    home.remove(&job).unwrap();
    assert!(!place.exists());
    assert_eq!(of_error(&home.find(Some("far")).unwrap_err()), Exit::NotFound);
    home.create(&spec("far"), None).unwrap();
}

#[test]
fn a_folder_with_other_things_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let home = Home::at(&root.path().join("home"));
    let place = root.path().join("photos");
    fs::create_dir(&place).unwrap();
    home.create(&spec("a"), Some(&place)).unwrap();
    let full = root.path().join("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("cat.jpg"), "").unwrap();
    let error = home.create(&spec("b"), Some(&full)).unwrap_err().to_string();
    assert!(error.contains("is not empty"), "{error}");
    let below_a_file = full.join("cat.jpg/job");
    let error = home.create(&spec("c"), Some(&below_a_file)).unwrap_err().to_string();
    assert!(error.contains("--job_dir"), "{error}");
}

#[test]
fn a_held_job_runs_and_cannot_be_removed() {
    let root = tempfile::tempdir().unwrap();
    let home = Home::at(root.path());
    let job = home.create(&spec("one"), None).unwrap();
    let hold = job.hold().unwrap().unwrap();
    assert!(job.is_running());
    assert!(job.hold().unwrap().is_none());
    assert_eq!(job.state(), JobState::Starting);
    assert!(home.remove(&job).unwrap_err().to_string().contains("elasticdl stop one"));
    drop(hold);
    assert!(!job.is_running());
    home.remove(&job).unwrap();
}

#[test]
fn a_misspelt_name_gets_a_suggestion() {
    let root = tempfile::tempdir().unwrap();
    let home = Home::at(root.path());
    home.create(&spec("mnist-cnn-1a2b"), None).unwrap();
    let error = home.find(Some("mnist-cn-1a2b")).unwrap_err().to_string();
    assert!(error.contains("did you mean `mnist-cnn-1a2b`?"), "{error}");
    let error = Home::at(Path::new("/nonexistent")).find(None).unwrap_err().to_string();
    assert!(error.contains("no jobs in"), "{error}");
}
