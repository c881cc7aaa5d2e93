// SPDX-License-Identifier: Apache-2.0
//! The same job described in different ways: files, kebab-case flags and ElasticDL's old names.

use edl_core::spec::JobSpec;

use crate::harness::{Home, N_RECORDS, ended, shipped, shipped_as, stderr};

fn nameless(home: &Home, name: &str) -> JobSpec {
    JobSpec { job_name: String::new(), ..home.spec(name) }
}

#[test]
fn a_file_and_equivalent_flags_describe_the_same_job() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let flags = [
        "--model_def=count",
        "--model_params=sleep_ms=1",
        data.as_str(),
        "--max_step=6",
        "--num_workers=1",
        "--grads_to_wait=2",
        "--checkpoint_secs=0",
        "--heartbeat_timeout_secs=7.5",
        "--seed=18446744073709551615",
        "--shuffle=false",
    ];
    home.train("by-flags", &flags);
    let yaml = home.stdout(&[&["train", "--print_config"], flags.as_slice()].concat());
    let file = home.path().join("job.yaml");
    std::fs::write(&file, yaml).expect("a file");
    let config = format!("--config={}", file.display());
    home.train("by-file", &[&config]);
    assert_eq!(nameless(&home, "by-flags"), nameless(&home, "by-file"));
    assert_ne!(nameless(&home, "by-file"), JobSpec::default());
    // A flag wins over the file.
    home.train("by-both", &[&config, "--max_step=4"]);
    assert_eq!(nameless(&home, "by-both"), JobSpec { max_step: 4, ..nameless(&home, "by-file") });
    assert_eq!(home.status("by-both")["step"], 4);
}

#[test]
fn a_job_description_can_be_read_from_a_pipe() {
    let home = Home::new();
    let file = home.path().join("job.yaml");
    let piped = |script: &str, args: &[&str], text: &str| {
        std::fs::write(&file, text).expect("a file");
        let command = home.command(args);
        let mut shell = std::process::Command::new("bash");
        shell.args(["-c", script, "bash"]).arg(command.get_program()).args(args);
        shell.env("FILE", &file).env("ELASTICDL_HOME", home.path());
        let output = ended(shell);
        assert!(output.status.success(), "{script}: {}", stderr(&output));
    };
    let data = shipped_as("training_data", "test");
    let text = "model_def: count\nmax_step: 3\nnum_workers: 1\nmodel_params: {sleep_ms: 1}\n";
    let stdin = r#"cat "$FILE" | "$@" --config=-"#;
    let device = r#"cat "$FILE" | "$@" --config=/dev/stdin"#;
    let substitution = r#""$@" --config <(cat "$FILE")"#;
    // Written once: who reads it twice waits forever.
    let fifo = r#"rm -f "$FILE.fifo"; mkfifo "$FILE.fifo"; cat "$FILE" > "$FILE.fifo" & "$@" --config="$FILE.fifo""#;
    let scripts =
        [("stdin", stdin), ("device", device), ("substitution", substitution), ("fifo", fifo)];
    for (name, script) in scripts {
        piped(script, &["train", "--job_name", name, &data], text);
        let spec = home.spec(name);
        assert_eq!((spec.max_step, spec.num_workers, spec.model_def.as_str()), (3, 1, "count"));
        assert_eq!(home.status(name)["step"], 3);
        piped(script, &["train", "--resume", name], "max_step: 4\n");
        assert_eq!(home.status(name)["step"], 4);
    }
}

#[test]
fn init_writes_a_file_that_config_accepts() {
    let home = Home::new();
    let file = home.path().join("new.yaml");
    let file = file.to_str().expect("text");
    assert_eq!(home.stdout(&["init", file]), format!("{file}\n"));
    let from_file = home.stdout(&["train", "--config", file, "--print_config"]);
    assert_eq!(from_file, home.stdout(&["train", "--print_config"]), "all defaults");
    assert_eq!(home.run(&["init", file]).status.code(), Some(2), "an existing file is kept");
    let data = shipped_as("training_data", "test");
    home.train("from-init", &["--config", file, "--model_def=count", &data, "--max_step=3"]);
    assert_eq!(home.status("from-init")["step"], 3);
}

#[test]
fn kebab_case_and_old_flags_work_and_old_ones_are_reported_as_deprecated() {
    let home = Home::new();
    let data = format!("--training-data-dir={}", shipped("test"));
    let validation = format!("--evaluation_data_dir={}", shipped("test"));
    let output = home.run(&[
        "train",
        "--job-name=an_old",
        "--model_file=count",
        &data,
        &validation,
        "--records-per-task=25",
        "--minibatch-size=10",
        "--num-workers=1",
        "--restart_policy=Never",
    ]);
    let printed = stderr(&output);
    assert!(output.status.success(), "{printed}");
    for (old, new) in [
        ("training_data_dir", "training_data"),
        ("evaluation_data_dir", "validation_data"),
        ("model_file", "model_def"),
        ("records_per_task", "num_minibatches_per_task"),
    ] {
        let line = format!("--{old} is deprecated; use --{new}");
        assert!(printed.lines().any(|found| found == line), "`{line}` in {printed}");
    }
    assert!(printed.contains("--restart_policy is ignored: "), "{printed}");
    let note = "the job is named `an-old`, because names cannot contain `_`";
    assert_eq!(printed.matches(note).count(), 1, "{printed}");
    let spec = home.spec("an-old");
    assert_eq!((spec.num_workers, spec.minibatch_size), (1, 10));
    assert_eq!(spec.num_minibatches_per_task, 3, "25 records are three batches of 10");
    assert_eq!(spec.validation_data, spec.training_data);
    assert_eq!(home.status("an-old")["records_done"], N_RECORDS);
}
