"""The manifests for Kubernetes: their fields exist, with values of the right kind, and what refers to something else finds it."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="pip install pyyaml")

from tests.examples.conftest import load as load_example  # noqa: E402

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


RAY_SERVICE = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"serveConfigV2", "rayClusterConfig", "serveService"},
    "rayClusterConfig": {"rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "workerGroupSpecs"},
    "headGroupSpec": {"rayStartParams", "template", "serviceType", "headService"},
    "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"},
}
"""Fields of ray.io/v1, from the types of KubeRay's operator, and those that must be there."""
REQUIRED = {
    "rayClusterConfig": {"headGroupSpec"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def test_fields_of_the_ray_service():
    service = load("ray-serve.yaml")["RayService"]
    cluster = service["spec"]["rayClusterConfig"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert service["apiVersion"] == "ray.io/v1"
    for name, part in (
        ("", service),
        ("spec", service["spec"]),
        ("rayClusterConfig", cluster),
        ("headGroupSpec", head),
        ("workerGroupSpecs", workers),
    ):
        assert set(part) <= RAY_SERVICE[name], name
        assert set(part) >= REQUIRED.get(name, set()), name
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (volume,), (container,) = group["template"]["spec"]["volumes"], group["template"]["spec"]["containers"]
        assert container["volumeMounts"][0]["name"] == volume["name"]
        assert (
            volume["persistentVolumeClaim"]["claimName"]
            == load("tensorflow-serving.yaml")["PersistentVolumeClaim"]["metadata"]["name"]
        )


def test_pods_of_the_ray_service():
    modules = [pytest.importorskip("kubernetes.client")]
    cluster = load("ray-serve.yaml")["RayService"]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        check(group["template"], "V1PodTemplateSpec", modules, "template")


def test_the_application_of_the_ray_service():
    """Ray's own schema takes it, a function of examples/serve.py makes it, and what it refers to is there."""
    schema = pytest.importorskip("ray.serve.schema", reason="pip install -e '.[serve]'")
    serve = load_example("serve")
    content = yaml.safe_load(load("ray-serve.yaml")["RayService"]["spec"]["serveConfigV2"])
    (application,) = schema.ServeDeploySchema.model_validate(content).applications
    module, _, function = application.import_path.partition(":")
    assert module == "serve"
    getattr(serve, function)(application.args)  # Ray checks the options of the deployments
    assert set(application.args) <= {"folders", *serve.OPTIONS}
    names = [Path(folder).name for folder in application.args["folders"]]
    assert all((ROOT / "saved_models" / name).is_dir() for name in names)
    assert {deployment.name for deployment in application.deployments} <= {*names, "gateway"}


def test_the_service_of_kserve_has_the_name_of_its_model():
    service = load("kserve.yaml")["InferenceService"]
    predictor = service["spec"]["predictor"]
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    assert predictor["model"]["modelFormat"] == {"name": "tensorflow"}
    assert predictor["model"]["storageUri"].rpartition("/")[2] == service["metadata"]["name"]
    assert predictor["minReplicas"] <= predictor["maxReplicas"]
