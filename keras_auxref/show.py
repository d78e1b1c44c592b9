"""`python -m keras_auxref.show saved_models/NAME` prints the signatures of an exported model; see `keras_auxref.serving.show`."""

from keras_auxref.serving.show import main

if __name__ == "__main__":
    main()
