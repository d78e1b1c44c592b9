"""The manifests for Kubernetes: their fields exist, with values of the right kind, and what refers to something else finds it."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="pip install pyyaml")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "kubernetes"


def load(name):
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / name).read_text())}


CLASSES = {
    "PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "Deployment": "V1Deployment",
    "Service": "V1Service",
    "HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler",
    "PodDisruptionBudget": "V1PodDisruptionBudget",
    "InferenceService": "V1beta1InferenceService",
}


def find(name, modules):
    for module in modules:
        if hasattr(module, name):
            return getattr(module, name)
    raise AssertionError(f"no class {name}")


def check(value, kind, modules, where):
    """A value against the types that the official Python clients generate from the schemas."""
    if match := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            check(item, match[1], modules, f"{where}[{number}]")
    elif match := re.fullmatch(r"dict\(str, (.+)\)|[Dd]ict\[str, (.+)\]", kind):
        assert isinstance(value, dict), where
        for key, item in value.items():
            check(item, match[1] or match[2], modules, f"{where}.{key}")
    elif kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, where
    elif kind in ("object", "ResourceQuantity", "IntOrString"):
        assert isinstance(value, str | int), where
    else:
        of = find(kind, modules)
        names = {key: name for name, key in of.attribute_map.items()}
        for key, item in value.items():
            assert key in names, f"{where}: {kind} has no {key}"
            check(item, of.openapi_types[names[key]], modules, f"{where}.{key}")


@pytest.mark.parametrize("file", ["tensorflow-serving.yaml", "kserve.yaml"])
def test_fields_are_those_of_the_schemas(file):
    modules = [pytest.importorskip("kubernetes.client")]
    if file == "kserve.yaml":
        modules.insert(0, pytest.importorskip("kserve").models)
    for kind, document in load(file).items():
        check(document, CLASSES[kind], modules, kind)


def test_an_unknown_field_is_found():
    modules = [pytest.importorskip("kubernetes.client")]
    document = load("tensorflow-serving.yaml")["Deployment"]
    document["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(AssertionError, match="V1Container has no prots"):
        check(document, "V1Deployment", modules, "Deployment")


def test_parts_of_tensorflow_serving_find_each_other():
    documents = load("tensorflow-serving.yaml")
    pod = documents["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert documents["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert documents["Service"]["spec"]["selector"] == labels
    assert documents["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    target = documents["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", documents["Deployment"]["metadata"]["name"])
    assert "replicas" not in documents["Deployment"]["spec"]  # which would fight with the autoscaler
    (container,), (volume,) = pod["spec"]["containers"], pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == documents["PersistentVolumeClaim"]["metadata"]["name"]
    assert container["volumeMounts"][0]["name"] == volume["name"]
    assert "cpu" in container["resources"]["requests"]  # of which the autoscaler takes its share
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in documents["Service"]["spec"]["ports"]} == ports
    assert container["readinessProbe"]["httpGet"]["port"] in ports
    assert container["livenessProbe"]["tcpSocket"]["port"] in ports
    config = container["args"][0].removeprefix("--model_config_file=/models/")
    model = container["readinessProbe"]["httpGet"]["path"].removeprefix("/v1/models/")
    assert f'name: "{model}" base_path: "/models/{model}"' in (ROOT / "saved_models" / config).read_text()


def test_the_service_of_kserve_has_the_name_of_its_model():
    service = load("kserve.yaml")["InferenceService"]
    predictor = service["spec"]["predictor"]
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    assert predictor["model"]["modelFormat"] == {"name": "tensorflow"}
    assert predictor["model"]["storageUri"].rpartition("/")[2] == service["metadata"]["name"]
    assert predictor["minReplicas"] <= predictor["maxReplicas"]
