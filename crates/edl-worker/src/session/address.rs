// SPDX-License-Identifier: Apache-2.0
//! Where the master is: at the address given, or where the job's folder says it is now.

use std::path::Path;

use crate::Config;

/// The address to try. A restarted master may listen elsewhere and says so in the job's folder;
/// but that file may be out of date, or not be there, so the two take turns.
pub(super) fn choose(config: &Config, attempt: usize) -> String {
    let given = config.master_addr.clone();
    if attempt.is_multiple_of(2) { given } else { published(&config.job_dir).unwrap_or(given) }
}

fn published(job_dir: &Path) -> Option<String> {
    let text = std::fs::read(job_dir.join("master.json")).ok()?;
    let json: serde_json::Value = serde_json::from_slice(&text).ok()?;
    Some(json.get("address")?.as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use edl_core::id::WorkerId;
    use edl_net::key::JobKey;
    use edl_net::place::Place;

    use super::*;

    #[test]
    fn a_master_that_moved_is_found_by_the_job_folder() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config {
            worker: WorkerId(0),
            master_addr: "old:1".into(),
            key: JobKey::from_bytes([0; 32]),
            job_dir: folder.path().into(),
            place: Place::default(),
        };
        assert_eq!(choose(&config, 1), "old:1", "no file");
        std::fs::write(folder.path().join("master.json"), r#"{"address": "new:2", "pid": 7}"#)
            .unwrap();
        assert_eq!([0, 1, 2].map(|attempt| choose(&config, attempt)), ["old:1", "new:2", "old:1"]);
        std::fs::write(folder.path().join("master.json"), "{").unwrap();
        assert_eq!(choose(&config, 1), "old:1", "a broken file");
    }
}
