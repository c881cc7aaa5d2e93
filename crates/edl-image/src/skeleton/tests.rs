// SPDX-License-Identifier: Apache-2.0
//! What `zoo init` writes.

use std::collections::BTreeMap;

use expect_test::expect;

use super::*;
use crate::dockerfile;

fn skeleton(language: Language) -> Skeleton {
    Skeleton {
        language,
        base_image: String::new(),
        model_zoo: "model_zoo".into(),
        local_pkg_dir: None,
        cluster_spec: None,
        extra_pypi_index: String::new(),
    }
}

#[test]
fn an_image_of_built_in_models_runs_nothing_while_it_is_built() {
    let dir = tempfile::tempdir().unwrap();
    let written = skeleton(Language::Rust).write(dir.path(), false).unwrap();
    assert!(written.contains(&dir.path().join("model_zoo/job.yaml")), "{written:?}");
    let text = fs::read_to_string(dir.path().join("Dockerfile")).unwrap();
    expect![[r#"
        # Created by `elasticdl zoo init`; edit as needed.
        # Build it: elasticdl zoo build --image=NAME:TAG
        ARG BASE_IMAGE=scratch
        FROM ${BASE_IMAGE}
        # The elasticdl command and its libraries, added by `elasticdl zoo build`.
        COPY .elasticdl/ /
        COPY model_zoo/ /model_zoo/
        # Containers run unprivileged with a read-only file system: only /tmp is writable.
        ENV PATH=/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONPATH=/model_zoo
        WORKDIR /
        USER 1000:1000
        ENTRYPOINT ["elasticdl"]
    "#]]
    .assert_eq(&text);
    assert_eq!(dockerfile::parse(&text, &BTreeMap::new()).unwrap().needs_tool(), None);
}

#[test]
fn a_python_image_installs_what_every_model_asks_for() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for file in
        ["model_zoo/a/requirements.txt", "model_zoo/a/a.py", "pkg/elasticdl-1.whl", "site.py"]
    {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }
    let wanted = Skeleton {
        base_image: "host.example/python:1".into(),
        local_pkg_dir: Some("pkg".into()),
        cluster_spec: Some(root.join("site.py")),
        extra_pypi_index: "https://index.example/simple".into(),
        ..skeleton(Language::Python)
    };
    wanted.write(root, false).unwrap();
    expect![[r#"
        # Created by `elasticdl zoo init`; edit as needed.
        # Build it: elasticdl zoo build --image=NAME:TAG
        ARG BASE_IMAGE=host.example/python:1
        FROM ${BASE_IMAGE}
        ARG EXTRA_PYPI_INDEX=https://index.example/simple
        COPY pkg/ /wheels/
        RUN pip install --no-cache-dir --extra-index-url=${EXTRA_PYPI_INDEX} /wheels/*.whl
        COPY model_zoo/ /model_zoo/
        RUN pip install --no-cache-dir --extra-index-url=${EXTRA_PYPI_INDEX} -r /model_zoo/a/requirements.txt
        COPY site.py /cluster_spec/
        # Containers run unprivileged with a read-only file system: only /tmp is writable.
        ENV PATH=/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONPATH=/model_zoo
        WORKDIR /
        USER 1000:1000
        ENTRYPOINT ["elasticdl"]
    "#]]
    .assert_eq(&fs::read_to_string(root.join("Dockerfile")).unwrap());
}

#[test]
fn a_first_model_is_written_only_where_there_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let here = Skeleton { model_zoo: ".".into(), ..skeleton(Language::Python) };
    here.write(dir.path(), false).unwrap();
    assert!(dir.path().join("my_model.py").is_file());
    let text = fs::read_to_string(dir.path().join("Dockerfile")).unwrap();
    assert!(
        text.contains("COPY . /model_zoo/\n") && text.contains("-r /model_zoo/requirements.txt")
    );
    assert!(matches!(here.write(dir.path(), false), Err(Error::Exists(_))));
    fs::write(dir.path().join("my_model.py"), "mine").unwrap();
    here.write(dir.path(), true).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("my_model.py")).unwrap(), "mine");
}

#[test]
fn what_cannot_work_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |wanted: Skeleton| wanted.write(dir.path(), false).unwrap_err().to_string();
    let rust = || skeleton(Language::Rust);
    let outside = refused(Skeleton { model_zoo: "..".into(), ..rust() });
    assert!(outside.contains("is outside `"), "{outside}");
    let no_file = refused(Skeleton { cluster_spec: Some("none.py".into()), ..rust() });
    assert!(no_file.starts_with("file `none.py` not found"), "{no_file}");
    let no_folder = refused(Skeleton { local_pkg_dir: Some("none".into()), ..rust() });
    assert!(no_folder.contains("check --local_pkg_dir"), "{no_folder}");
    fs::create_dir(dir.path().join("pkg")).unwrap();
    let no_wheel = refused(Skeleton { local_pkg_dir: Some("pkg".into()), ..rust() });
    assert!(no_wheel.contains("contains no wheel"), "{no_wheel}");
    assert!(!dir.path().join("Dockerfile").exists());
}
