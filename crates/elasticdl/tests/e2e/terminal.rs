// SPDX-License-Identifier: Apache-2.0
//! The terminal view in a real terminal, and the demo.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::harness::{Home, PATIENCE, assert_exactly_once, print_note, shipped_as, signal, stderr};

/// A separate terminal that ends with the test.
struct Terminal {
    /// The socket of this test's tmux server.
    socket: String,
}

impl Terminal {
    /// `None` if tmux is not installed.
    fn open(home: &Home, args: &str) -> Option<Self> {
        let socket = home.path().join("tmux").display().to_string();
        let command = format!(
            "ELASTICDL_HOME='{}' '{}' {args}; exec cat",
            home.path().display(),
            env!("CARGO_BIN_EXE_elasticdl")
        );
        let terminal = Self { socket };
        let started = terminal.tmux(&[
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            "120",
            "-y",
            "42",
            &command,
        ]);
        match started {
            Some(output) => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                Some(terminal)
            }
            None => {
                print_note("skipped: tmux is not installed; `make setup` installs it");
                None
            }
        }
    }

    fn tmux(&self, args: &[&str]) -> Option<Output> {
        Command::new("tmux").args(["-S", &self.socket]).args(args).output().ok()
    }

    fn press(&self, key: &str) {
        let sent = self.tmux(&["send-keys", key]).expect("tmux was there");
        assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
    }

    fn text(&self) -> String {
        let shown = self.tmux(&["capture-pane", "-p"]).expect("tmux was there");
        String::from_utf8_lossy(&shown.stdout).into_owned()
    }

    /// Waits until the text on the screen fulfils `condition`.
    fn wait_until(&self, what: &str, condition: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let text = self.text();
            if condition(&text) {
                return text;
            }
            assert!(start.elapsed() < PATIENCE, "timed out waiting for {what}:\n{text}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]);
    }
}

#[test]
fn the_terminal_view_draws_kills_scales_and_leaves_the_job_alone() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let job = [
        "train",
        "--detach",
        "--job_name=seen",
        "--model_def=count",
        "--model_params=sleep_ms=30",
        &data,
        "--num_epochs=2",
        "--minibatch_size=10",
        "--num_minibatches_per_task=4",
        "--checkpoint_secs=1",
        "--max_workers=4",
        "--allow_chaos",
    ];
    home.stdout(&job);
    let Some(terminal) = Terminal::open(&home, "top seen") else { return };
    // Plots consist of Braille characters.
    let is_plot = |text: &str| text.chars().any(|c| ('\u{2801}'..='\u{28ff}').contains(&c));
    terminal.wait_until("a plot", |text| is_plot(text) && text.contains("▸ worker-"));
    terminal.press("k");
    terminal.wait_until("the confirmation prompt", |text| {
        text.contains("press k again to kill worker-")
    });
    terminal.press("k");
    terminal.wait_until("the kill", |text| text.contains("was killed"));
    terminal.wait_until("its replacement", |text| text.contains("worker-2 "));
    terminal.press("+");
    terminal.wait_until("a third worker", |text| text.contains("target workers: 3"));
    terminal.press("q");
    terminal.wait_until("the exit message", |text| text.contains("keeps running; stop it"));
    home.wait_until("seen", "the end", |status| status["state"] == "succeeded");
    assert_exactly_once(&home, "seen", 2, 1);
}

#[test]
fn on_a_terminal_evaluations_and_checkpoints_are_lines_above_the_bar() {
    let home = Home::new();
    let (training, validation) =
        (shipped_as("training_data", "test"), shipped_as("validation_data", "test"));
    let args = format!("train --model_def=mnist_mlp {training} {validation} --num_epochs=2");
    let Some(terminal) = Terminal::open(&home, &args) else { return };
    let text = terminal.wait_until("the summary", |text| text.contains("elasticdl audit"));
    assert_eq!(text.matches("✓ evaluation at step ").count(), 2, "{text}");
    assert!(text.contains("✓ checkpoint ") && !text.contains("[INFO]"), "{text}");
}

#[test]
fn the_demo_ends_with_an_audit_and_bit_identical_results() {
    let home = Home::new();
    let output = home.run(&["demo", "--plain", "--epochs=4", "--seed=3"]);
    let (text, told) = (String::from_utf8_lossy(&output.stdout), stderr(&output));
    assert_eq!(output.status.code(), Some(0), "{text}{told}");
    assert!(
        text.contains("every record of every finished epoch was trained exactly once"),
        "{text}"
    );
    assert!(text.contains("3 processes killed") && text.contains("bit-identical"), "{text}");
    for victim in ["worker-", "ps-", "the master"] {
        let line = |start: &str, then: &str| {
            told.lines().any(|l| l.contains(&format!("{start}{victim}")) && l.contains(then))
        };
        assert!(line(": ", "was killed (kill -9 "), "{told}");
        assert!(line("after the loss of ", "healed "), "{told}");
    }
    let (_, next) = text.split_once("\nTry next:\n").expect("three commands");
    assert_eq!(next.lines().filter(|line| line.starts_with("  elasticdl ")).count(), 3, "{text}");
}

#[test]
fn an_interrupted_demo_leaves_no_job_behind() {
    let home = Home::new();
    // Long enough for a kill on any machine.
    let mut demo = home.start("demo", &["demo", "--plain", "--epochs=100"]);
    let (stderr, start) = (home.path().join("demo.stderr"), Instant::now());
    while !std::fs::read_to_string(&stderr).is_ok_and(|text| text.contains("was killed")) {
        assert!(start.elapsed() < PATIENCE, "{}", demo.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    signal(demo.pid(), Signal::INT);
    assert_eq!(demo.wait().code(), Some(130));
    assert_eq!(home.jobs(), [""; 0]);
}
