//! The demo tells the truth: it passes because the store does its part, and fails where a service does not use it.

use std::process::{Command, Output};

fn demo(args: &[&str]) -> (Output, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_keyonce")).arg("demo").args(args).output().unwrap();
    let told = String::from_utf8(output.stdout.clone()).unwrap();
    (output, told)
}

/// The verdict and the lines of each scene, by its number; the lines of a scene's further acts are among them.
fn scenes(told: &str) -> Vec<(String, Vec<String>)> {
    let mut scenes: Vec<(String, Vec<String>)> = Vec::new();
    for line in told.lines().filter(|line| !line.starts_with("demo:")) {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["ok" | "FAILED", number, ..] if number == format!("{}.", scenes.len() + 1) => {
                scenes.push((line[..6].trim().to_owned(), Vec::new()));
            }
            _ => scenes.last_mut().unwrap().1.push(line.trim().to_owned()),
        }
    }
    scenes
}

#[test]
fn every_scene_goes_as_told() {
    let (output, told) = demo(&[]);
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(told.ends_with("demo: 9 scenes, all as told\n"), "{told}");
    assert!(!told.contains('\x1b'), "colours belong on a terminal alone");
    let charges: Vec<Vec<usize>> = scenes(&told)
        .iter()
        .map(|(verdict, lines)| {
            assert_eq!(verdict, "ok");
            assert!(lines.iter().any(|line| line.starts_with("client sees: ")), "{told}");
            let ledgers = lines.iter().filter_map(|line| line.strip_prefix("ledger:"));
            ledgers.map(|charges| charges.matches("EUR").count()).collect()
        })
        .collect();
    assert_eq!(charges, [vec![0], vec![1], vec![2], vec![1], vec![1], vec![2], vec![1], vec![2], vec![1, 2]]);
}

#[test]
fn a_service_that_ignores_keys_fails_the_scenes_that_need_them() {
    let (output, told) = demo(&["--ignore-keys"]);
    assert_eq!(output.status.code(), Some(1), "{told}");
    let verdicts: Vec<String> = scenes(&told).into_iter().map(|(verdict, _)| verdict).collect();
    assert_eq!(verdicts, ["ok", "ok", "ok", "FAILED", "ok", "ok", "FAILED", "ok", "FAILED"], "{told}");
    assert!(told.ends_with("demo: 9 scenes, 3 not as told\n"), "{told}");
}

#[test]
fn the_switch_that_fails_the_demo_is_documented() {
    let (output, help) = demo(&["--help"]);
    assert!(output.status.success());
    assert!(help.contains("--ignore-keys") && help.contains("to see the demo fail"), "{help}");
    assert!(!help.contains("--serve"), "what the demo uses on itself is hidden: {help}");
}
